# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 trees: the head is run once per level, over the frontier of all trees.

The context's keys and values are written when tokens are committed, each with the token after it.
A drafted node attends them and its own branch, and takes its parent's state: every branch is what
the head would draft as a chain along it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from vllm_specplug.drafting.drafter import (
    BranchCache,
    CommittedTokens,
    DraftCacheSpec,
    DraftRequests,
    TargetWeights,
    device_tensor,
)
from vllm_specplug.drafting.head_drafter import HeadDrafter
from vllm_specplug.drafting.ngram import ngram_branches
from vllm_specplug.kernels import top_candidates
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head
from vllm_specplug.methods.eagle3_tree.head import Attend, FusedDraftLayer, FusedEagle3Head
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import BranchRows, Expand, Frontier, draft_level_by_level


class StateDrafter(HeadDrafter):
    """A layer over a token's embedding and the state before it.

    Subclasses set the attributes below in `load`.
    """

    head: FusedDraftLayer
    # [V, H]
    embed_tokens: torch.Tensor
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    # [V'] target id of each draft id, where the draft vocabulary is reduced
    target_ids: torch.Tensor | None
    draft_vocab_size: int
    # [B, H] states of each request's last committed position, in batch order
    _roots: torch.Tensor

    @abstractmethod
    def target_states(self, committed: CommittedTokens) -> torch.Tensor:
        """States [M, H] of committed positions, from what the target put out."""

    def cache_specs(self) -> list[DraftCacheSpec]:
        return [DraftCacheSpec(self.head.shape.num_key_value_heads, self.head.shape.head_dim)]

    def observe(self, committed: CommittedTokens) -> None:
        rows, following = committed.rows, committed.next_token_ids
        states = self.target_states(committed)
        if following is None:
            following = torch.zeros_like(rows)
        embeds = self._embed(following, committed.positions)
        key, value = self.head.context_kv(embeds, states, committed.positions)
        self.cache.write(key[None], value[None], committed.slots)
        if committed.last_rows is not None:
            # Rows ascend: each request's last one stands before the next request's first.
            self._roots = states[torch.searchsorted(rows, committed.last_rows.to(rows.device))]

    def draft(self, requests: DraftRequests) -> list[DraftTree]:
        return draft_level_by_level(
            requests.anchors,
            requests.budgets,
            [min(depth, self.options.tree_depth) for depth in requests.depths],
            requests.widths,
            self._expander(requests),
            frontier_width=self.options.settings.expand_width,
        )

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, H] of the tokens after `positions`."""
        # A prompt may hold ids of the tokenizer past the target's vocabulary: vLLM's padded table
        # embeds them, this one ends before. Any row will do for a draft.
        return self.embed_tokens[token_ids.clamp(0, len(self.embed_tokens) - 1)]

    def _root_states(self, requests: DraftRequests) -> torch.Tensor:
        """[R, H]; zeros in drafts that no step came before."""
        if max(requests.req_indices) >= len(self._roots):
            return self.embed_tokens.new_zeros(len(requests), self.embed_tokens.shape[1])
        return self._roots[device_tensor(requests.req_indices, self._roots.device)]

    def _expander(self, requests: DraftRequests) -> Expand:
        device = self.embed_tokens.device
        rows = BranchRows(len(requests))
        # The root's row stands at the position before the anchor: its state is of that position.
        starts = np.asarray(requests.context_lens) - 1
        width = min(max(requests.widths), self.draft_vocab_size)
        levels: list[tuple[torch.Tensor, ...]] = []  # q, k, v of each level's rows
        owners: list[np.ndarray] = []  # request of each of those rows
        states = self._root_states(requests)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            levels.append((query, key, value))
            # Rows of one request lie together; earlier levels are queried again.
            order = np.argsort(np.concatenate(owners), kind="stable")
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            index = device_tensor(order, device)
            joined = [torch.cat(parts)[index] for parts in zip(*levels, strict=True)]
            attention = cast(BranchCache, self.cache).branch_attention(
                requests, starts.tolist(), rows.parent_arrays()
            )
            mixed: torch.Tensor = attention(0, *joined)
            return mixed[device_tensor(place[-len(query) :], device)]

        def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            nonlocal states
            rows.add(frontier)
            owners.append(frontier.requests)
            # Below the roots, states are those that the level before put out.
            parents = frontier.parent_rows if frontier.depth else frontier.requests
            positions = starts[frontier.requests] + frontier.depth
            positions = np.minimum(positions, self.options.max_model_len - 1)
            hidden, states = self._run(
                device_tensor(frontier.token_ids, device),
                states[device_tensor(parents, device)],
                device_tensor(positions, device),
                attend,
            )
            ids, log_probs = top_candidates(self.lm_head(hidden), width)
            ids = ids if self.target_ids is None else self.target_ids[ids]
            return ids.cpu().numpy(), log_probs.cpu().numpy()

        return expand

    def _run(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(self._embed(token_ids, positions), states, positions, attend)


class Eagle3Drafter(StateDrafter):
    """Any EAGLE-3 head of one layer."""

    head: FusedEagle3Head

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        assert self.options.head_path is not None
        head, extras = load_eagle3_head(
            self.options.head_path,
            target.text_config,
            target_layers=self.options.settings.target_layers,
        )
        head = head.to(device=target.device, dtype=target.dtype)
        self.config = head.config
        embed = target.embed_tokens if extras.embed_tokens is None else extras.embed_tokens
        # [V, H]
        self.embed_tokens = embed.to(device=target.device, dtype=target.dtype)
        # [V'] target id of each draft id, where the draft vocabulary is reduced
        self.target_ids = extras.target_ids
        if self.target_ids is not None:
            self.target_ids = self.target_ids.to(target.device)
        self.lm_head = target.make_lm_head(self.target_ids, extras.lm_head)
        self.head = FusedEagle3Head(head, self.options.max_model_len, target.make_linear)
        self.ngrams = ngram_branches(self.options)
        self.draft_vocab_size = self.config.draft_vocab_size
        self._roots = self.embed_tokens.new_zeros(0, self.config.hidden_size)

    def target_states(self, committed: CommittedTokens) -> torch.Tensor:
        rows = committed.rows
        aux = torch.cat([hidden[rows] for hidden in committed.aux_hidden_states], dim=-1)
        return self.head.features(aux)
