# SPDX-License-Identifier: Apache-2.0
"""The base class of drafters that draft one level of all trees per forward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from vllm_specplug.drafting.branch_drafter import BranchDrafter
from vllm_specplug.drafting.device_levels import (
    MAX_LOGITS,
    DeviceExpand,
    DeviceFrontier,
    draft_levels_on_device,
    max_frontier_width,
    read_trees,
)
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.kernels import top_candidates
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import FRONTIER_WIDTH, Expand, Frontier, draft_level_by_level


class LevelDrafter(BranchDrafter):
    """A drafter that expands the frontiers of all trees with one forward per level.

    Subclasses set the attributes below in `load`.
    """

    drafts_by_level: ClassVar[bool] = True
    frontier_width: ClassVar[int] = FRONTIER_WIDTH
    """Maximum number of nodes per tree that a level expands. With the default, trees are best-first
    for node budgets up to 16 and close to best-first above."""
    # [V, H]
    embed_tokens: torch.Tensor
    # [V'] target id of each draft id; None if the head drafts the whole vocabulary
    target_ids: torch.Tensor | None
    draft_vocab_size: int
    # [T, H] -> [T, V']
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    drafts_on_device = False
    """Whether the bound cache is on a device, so that drafting does not involve the host."""
    levels_run: int | None = 0
    """Number of levels of the last draft, which may end before the requested depth."""

    @abstractmethod
    def prepare_context(self, requests: DraftRequests | DeviceRequests) -> None:
        """Computes the context that a draft for these requests reads."""

    @abstractmethod
    def host_expand(self, requests: DraftRequests) -> Expand:
        """Returns the function that expands the levels of a draft on the host."""

    @abstractmethod
    def device_expand(
        self, requests: DraftRequests | DeviceRequests, context_lens: torch.Tensor, width: int
    ) -> DeviceExpand:
        """Returns the function that expands the levels of a draft on the device.

        Args:
            context_lens: [R] number of tokens before each anchor.
            width: maximum number of children of a node.
        """

    @property
    def forward_depth(self) -> int:
        return self.options.tree_depth

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        trees = [DraftTree.empty()] * len(requests)
        chosen, drafted = requests.for_forward()
        if chosen:
            for r, tree in zip(chosen, self.draft(drafted), strict=True):
                trees[r] = tree
        return trees if self.ngrams is None else self.ngrams.add_to(trees, requests)

    def draft(self, requests: DraftRequests) -> list[DraftTree]:
        """Returns the trees of the head only, for at least one request."""
        self.prepare_context(requests)
        depths = [min(depth, self.options.tree_depth) for depth in requests.depths]
        if not self.drafts_on_device:
            return draft_level_by_level(
                requests.anchors,
                requests.budgets,
                depths,
                requests.widths,
                self._counted(self.host_expand(requests)),
                min_node_prob=requests.min_node_prob,
                min_level_prob=requests.min_level_prob,
                frontier_width=self.frontier_width,
            )
        self.levels_run = max(depths)
        columns = (
            requests.anchors, requests.context_lens, requests.budgets, depths, requests.widths
        )  # fmt: skip
        *arguments, widths = device_tensor(np.array(columns), self.embed_tokens.device)
        # The option's width, not the requests' maximum: kernels have a variant per number of rows
        # in a level, and start-up compiles only the variants of full trees.
        trees = self._draft_on_device(
            requests,
            *arguments,
            num_levels=max(depths),
            width=self.options.tree_width,
            widths=widths,
        )
        return read_trees(trees)

    def _counted(self, expand: Expand) -> Expand:
        """Returns `expand`, which also counts `levels_run` from 0."""
        levels = self.levels_run = 0

        def count(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            nonlocal levels
            levels += 1
            self.levels_run = levels
            return expand(frontier)

        return count

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees:
        self.prepare_context(requests)
        levels = self.options.tree_depth
        if requests.max_depth is not None:
            levels = min(levels, requests.max_depth)
        return self._draft_on_device(
            requests,
            requests.anchors,
            requests.context_lens,
            requests.budgets,
            requests.depths,
            num_levels=levels,
            width=requests.width,
        )

    def _draft_on_device(
        self,
        requests: DraftRequests | DeviceRequests,
        # [R] each
        anchors: torch.Tensor,
        context_lens: torch.Tensor,
        budgets: torch.Tensor,
        depths: torch.Tensor,
        *,
        num_levels: int,
        width: int,
        widths: torch.Tensor | None = None,
    ) -> DeviceTrees:
        options = self.options
        return draft_levels_on_device(
            anchors,
            budgets,
            depths,
            self.device_expand(requests, context_lens, width),
            num_levels=num_levels,
            # Not the requests' largest budget: see `draft`.
            num_nodes=options.num_nodes,
            width=width,
            widths=widths,
            frontier_width=min(self.frontier_width, max_frontier_width(options.tree_depth)),
        )

    def level_positions(self, starts: torch.Tensor, frontier: DeviceFrontier) -> torch.Tensor:
        """Returns the positions int64 [R * F] of a frontier, given those of the roots [R]."""
        last = self.options.max_model_len - 1
        positions = (starts + frontier.depth).clamp_max(last).long()
        return positions.repeat_interleave(frontier.token_ids.shape[1])

    def level_candidates(
        self,
        # [R * F, H]
        hidden: torch.Tensor,
        # R, F
        shape: torch.Size,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `width` likeliest children of a frontier's nodes, see `DeviceExpand`."""
        ids, log_probs = self.candidates(hidden, width)
        return ids.view(*shape, -1), log_probs.view(*shape, -1)

    def candidates(self, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `width` likeliest tokens after states [T, H], best first: target token ids
        int64 [T, width] and log-probabilities float32 [T, width]."""
        width = min(width, self.draft_vocab_size)
        # In pieces: the logits of all requests would be the largest tensor of a step.
        pieces = torch.split(hidden, max(1, MAX_LOGITS // self.score_size))
        found = [self.score(piece, width) for piece in pieces]
        ids, log_probs = (torch.cat(parts) for parts in zip(*found, strict=True))
        return ids, log_probs

    @property
    def score_size(self) -> int:
        """Numbers that `score` computes or gathers for one state."""
        return self.draft_vocab_size

    def score(self, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `candidates` of a few states."""
        ids, log_probs = top_candidates(self.lm_head(hidden), width)
        return self.to_target_ids(ids), log_probs

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, H] of token ids [T], which may exceed the vocabulary."""
        # A prompt may hold token ids past the target's vocabulary. vLLM's padded table has rows for
        # them, this one does not; for a draft any row will do.
        return self.embed_tokens[token_ids.clamp(0, len(self.embed_tokens) - 1)]

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Returns the target token ids of draft token ids, of any shape."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]
