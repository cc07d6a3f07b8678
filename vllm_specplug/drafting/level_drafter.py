# SPDX-License-Identifier: Apache-2.0
"""The base class of drafters that draft one level of all trees per forward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from vllm_specplug.drafting.device_levels import (
    DeviceExpand,
    DeviceFrontier,
    draft_levels_on_device,
    max_frontier_width,
)
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.head_drafter import HeadDrafter
from vllm_specplug.drafting.level_rows import DeviceRows, HostRows, LevelRows
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import FRONTIER_WIDTH, Expand, Frontier, draft_level_by_level


class LevelDrafter(HeadDrafter):
    """A drafter that expands the frontiers of all trees with one forward per level."""

    drafts_by_level: ClassVar[bool] = True
    follows_first_rank: ClassVar[bool] = True
    drafts_on_device = True
    levels_run: int | None = 0
    """Number of levels of the last draft, which may end before the requested depth."""

    @property
    def can_be_captured(self) -> bool:
        # Collectives inside a captured draft are untested.
        return self.first_rank is None and super().can_be_captured

    @abstractmethod
    def prepare_context(self, requests: DraftRequests | DeviceRequests) -> None:
        """Computes the context that a draft for these requests reads."""

    @abstractmethod
    def level_forward(self, rows: LevelRows) -> Callable[[], torch.Tensor]:
        """Returns the forward of a draft, which is called for each of its levels in turn.

        It runs the head on the current `rows`, and returns what the LM head reads, [n, H].
        """

    def draft(self, requests: DraftRequests) -> list[DraftTree]:
        self.prepare_context(requests)
        self.levels_run = 0
        return draft_level_by_level(
            requests.anchors,
            requests.budgets,
            self.depths_of(requests),
            requests.width,
            self.host_expand(requests),
            min_node_prob=requests.min_node_prob,
            min_level_prob=requests.min_level_prob,
            frontier_width=FRONTIER_WIDTH,
        )

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees:
        self.prepare_context(requests)
        options = self.options
        return draft_levels_on_device(
            requests.anchors,
            requests.budgets,
            requests.depths,
            self.device_expand(requests),
            num_levels=self.max_depth_of(requests),
            # Not the requests' largest budget: kernels have a variant per number of rows in a
            # level, and start-up compiles only the variants of full trees.
            num_nodes=options.num_nodes,
            width=requests.width,
            frontier_width=min(FRONTIER_WIDTH, max_frontier_width(options.tree_depth)),
        )

    def host_expand(self, requests: DraftRequests) -> Expand:
        """Returns the function that expands the levels of a draft on the host."""
        rows = HostRows(requests, self.options.max_model_len - 1, self.embed_tokens.device)
        forward, width = self.level_forward(rows), requests.width

        def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            self.levels_run = frontier.depth + 1
            rows.add(frontier)
            ids, log_probs = self._candidates(forward(), width)
            return ids.cpu().numpy(), log_probs.cpu().numpy()

        return expand

    def device_expand(self, requests: DeviceRequests) -> DeviceExpand:
        """Returns the function that expands the levels of a draft on the device."""
        rows = DeviceRows(requests, self.options.max_model_len - 1)
        forward, width = self.level_forward(rows), requests.width

        def expand(frontier: DeviceFrontier) -> tuple[torch.Tensor, torch.Tensor]:
            rows.add(frontier)
            ids, log_probs = self._candidates(forward(), width)
            shape = frontier.token_ids.shape
            return ids.view(*shape, -1), log_probs.view(*shape, -1)

        return expand

    def _candidates(self, states: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `likeliest`, the same on all ranks that draft together."""
        ids, log_probs = self.likeliest(states, width)
        if self.first_rank is None:
            return ids, log_probs
        # Ranks' states differ in their last bits, so candidates are the first rank's: one message.
        shared = self.first_rank(torch.stack((ids.int(), log_probs.view(torch.int32))))
        return shared[0].long(), shared[1].view(torch.float32)
