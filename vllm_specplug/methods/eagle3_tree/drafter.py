# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 trees: the head is run once per level, over the frontier of all trees.

The context's keys and values are those of committed tokens, each with the token after it; they are
computed before a draft needs them, many at once. A drafted node attends them and its own branch,
and takes its parent's state: every branch is what the head would draft as a chain along it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
import torch

from vllm_specplug.drafting.context_backlog import ContextBacklog
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

    Subclasses set the attributes below in `load`, and end it with `_begin`.
    """

    head: FusedDraftLayer
    # [V, H]
    embed_tokens: torch.Tensor
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    # [V'] target id of each draft id, where the draft vocabulary is reduced
    target_ids: torch.Tensor | None
    draft_vocab_size: int
    _backlog: ContextBacklog
    # [B, H] states of each request's last committed position, in batch order
    _roots: torch.Tensor
    # [B] where the rows of those positions lie among the tokens that wait, from the end; None when
    # `_roots` is up to date
    _root_places: torch.Tensor | None

    def _begin(self, hidden_size: int) -> None:
        self._backlog = ContextBacklog.on(self.embed_tokens.device, self._write_context)
        self._roots = self.embed_tokens.new_zeros(0, hidden_size)
        self._root_places = None

    @abstractmethod
    def target_outputs(self, committed: CommittedTokens) -> torch.Tensor:
        """[M, C] what is kept of what the target put out at committed positions, a copy."""

    def target_states(self, outputs: torch.Tensor) -> torch.Tensor:
        """States [M, H] of `target_outputs` [M, C]."""
        return outputs

    def cache_specs(self) -> list[DraftCacheSpec]:
        return [DraftCacheSpec(self.head.shape.num_key_value_heads, self.head.shape.head_dim)]

    def observe(self, committed: CommittedTokens) -> None:
        rows, following = committed.rows, committed.next_token_ids
        if not len(rows):
            return
        if following is None:
            following = torch.zeros_like(rows)
        if committed.last_rows is not None:
            # Rows ascend: each request's last one stands before the next request's first.
            places = torch.searchsorted(rows, committed.last_rows.to(rows.device))
            self._root_places = places - len(rows)
        outputs = self.target_outputs(committed)
        self._backlog.add(outputs, following, committed.positions, committed.slots)

    def catch_up(self) -> None:
        self._backlog.flush()

    def forget(self, req_ids: Iterable[str]) -> None:
        # Their pages may go to others in this very step.
        self._backlog.flush()
        super().forget(req_ids)

    def _write_context(
        self,
        outputs: torch.Tensor,
        following: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """outputs [M, C]; the token after each, positions and slots int64 [M]."""
        states = self.target_states(outputs)
        key, value = self.head.context_kv(self._embed(following, positions), states, positions)
        self.cache.write(key[None], value[None], slots)
        if self._root_places is not None:
            self._roots, self._root_places = states[self._root_places], None

    def draft(self, requests: DraftRequests) -> list[DraftTree]:
        self._backlog.flush()
        return draft_level_by_level(
            requests.anchors,
            requests.budgets,
            [min(depth, self.options.tree_depth) for depth in requests.depths],
            requests.widths,
            self._expander(requests),
            least_node=requests.least_node,
            least_level=requests.least_level,
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
        starts = [length - 1 for length in requests.context_lens]
        first = np.array(starts)
        width = min(max(requests.widths), self.draft_vocab_size)
        levels: list[tuple[torch.Tensor, ...]] = []  # q, k, v of each level's rows
        owners: list[np.ndarray] = []  # request of each of those rows
        states = self._root_states(requests)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            levels.append((query, key, value))
            # Earlier levels are queried again.
            joined = levels[0]
            if len(levels) > 1:
                joined = tuple(torch.cat(parts) for parts in zip(*levels, strict=True))
            attention = cast(BranchCache, self.cache).branch_attention(
                requests, starts, rows.parent_arrays()
            )
            if len(requests) == 1 or len(levels) == 1:
                mixed: torch.Tensor = attention(0, *joined)
                return mixed[-len(query) :]
            # Rows of one request lie together.
            order = np.argsort(np.concatenate(owners), kind="stable")
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            index = device_tensor(order, device)
            mixed = attention(0, *(part[index] for part in joined))
            return mixed[device_tensor(place[-len(query) :], device)]

        def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            nonlocal states
            rows.add(frontier)
            owners.append(frontier.requests)
            # Below the roots, states are those that the level before put out.
            parents = frontier.parent_rows if frontier.depth else frontier.requests
            positions = first[frontier.requests] + frontier.depth
            positions = np.minimum(positions, self.options.max_model_len - 1)
            # One copy for all three, where the device is another.
            ids, above, at = device_tensor(
                np.stack((frontier.token_ids, parents, positions)), device
            )
            hidden, states = self._run(ids, states[above], at, attend)
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
        self._begin(self.config.hidden_size)

    def target_outputs(self, committed: CommittedTokens) -> torch.Tensor:
        return torch.cat([hidden[committed.rows] for hidden in committed.aux_hidden_states], dim=-1)

    def target_states(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.head.features(outputs)
