# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 trees: forwards of the head draft all trees, level by level or, with P-EAGLE heads, at
once.

Each layer's context holds one key and value per committed token, computed from its state and the
token after it. In later layers they also depend on earlier tokens. Such heads compute them in every
step; other heads may defer them. A node attends the context and its own branch and reads its
parent's state, so every branch equals the chain that the head would draft along it. With a P-EAGLE
head a node reads masks in place of its branch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_specplug.drafting.caches import DraftCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.depth_drafter import DepthDrafter
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.drafting.head_drafter import HeadDrafter
from vllm_specplug.drafting.late_context import LateContextDrafter
from vllm_specplug.drafting.level_drafter import LevelDrafter
from vllm_specplug.drafting.level_rows import LevelRows
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.drafting.root_states import RootStates
from vllm_specplug.methods.block.head import Attend
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head
from vllm_specplug.methods.eagle3_tree.head import FusedDraftLayers, FusedEagle3Head


class StateContext(RootStates, LateContextDrafter, HeadDrafter):
    """The context of a drafter whose layers read a token's embedding and the state of the previous
    position.

    Subclasses set the attributes below in `load` and call `begin_context` at its end.
    """

    head: FusedDraftLayers
    windows: tuple[int | None, ...] = (None,)
    """The sliding window of each layer; None for full attention."""
    # [B] rows of the roots' positions in the backlog, counted from its end; None if `_roots` is
    # current
    _root_rows: torch.Tensor | None
    # [B, C] target outputs of those positions if the backlog defers them, else None
    _root_outputs: torch.Tensor | None

    def begin_context(self, hidden_size: int) -> None:
        """Sets up the backlog and the root states, whose size is `hidden_size`."""
        # With several layers, a token's keys and values depend on earlier tokens' keys and values,
        # so none may be deferred.
        self.attends_context = len(self.windows) > 1
        self.begin_backlog(self.embed_tokens.device, self._write_context)
        self._roots = self.embed_tokens.new_zeros(0, hidden_size)
        self._root_rows = self._root_outputs = None

    @abstractmethod
    def target_outputs(self, committed: CommittedTokens) -> torch.Tensor:
        """Returns a copy of the target's outputs at committed positions [M, C]."""

    def target_states(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the states [M, H] of `target_outputs` [M, C]."""
        return outputs

    def cache_specs(self) -> list[DraftCacheSpec]:
        shape = self.head.shape
        return [
            DraftCacheSpec(shape.num_key_value_heads, shape.head_dim, window)
            for window in self.windows
        ]

    def observe(self, committed: CommittedTokens) -> None:
        rows, following = committed.rows, committed.next_token_ids
        if not len(rows):
            return
        if following is None:
            following = torch.zeros_like(rows)
        outputs = self.target_outputs(committed)
        if committed.last_rows is not None:
            last = committed.last_rows.to(rows.device)
            # Rows from a device have no order, and rejected rows repeat the row of their root.
            root_rows = (rows == last[:, None]).int().argmax(1) - len(rows)
            self._root_rows = self._root_outputs = None
            if self.backlog.is_deferring:
                # The backlog may write other tokens before these, or drop them.
                self._root_outputs = outputs[root_rows]
            else:
                self._root_rows = root_rows
        columns = [outputs, following, committed.positions, committed.slots]
        if self.attends_context:
            columns.insert(3, committed.table_rows_on(rows.device))
        self.backlog.add(*columns, req_ids=committed.req_ids, owners=committed.owners)

    def _write_context(
        self,
        outputs: torch.Tensor,
        following: torch.Tensor,
        positions: torch.Tensor,
        *columns: torch.Tensor,
    ) -> None:
        """Writes keys and values of committed tokens into the cache.

        Args:
            outputs: target outputs [M, C].
            following: int64 [M], the token after each.
            positions: int64 [M].
            columns: rows of the block table int32 [M] if `attends_context`, and slots int64 [M].
        """
        *table_rows, slots = columns
        states = self.target_states(outputs)
        embeds = self._embed(following, positions)
        attention = None
        if self.attends_context:
            attention = self.cache.context_attention(table_rows[0], positions, slots)

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            assert attention is not None
            # Rows attend each other through the cache.
            self.cache.write(key[None], value[None], slots, layer)
            return attention(layer, query, key, value)

        key, value = self.head.context_kv(embeds, states, positions, attend)
        self.cache.write(key[None], value[None], slots, len(self.windows) - 1)
        if self._root_rows is not None:
            self._roots, self._root_rows = states[self._root_rows], None

    @property
    def request_states(self) -> torch.Tensor:
        if self._root_outputs is not None:
            self._roots, self._root_outputs = self.target_states(self._root_outputs), None
        return self._roots

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, H] of the tokens after `positions`."""
        return self.embed(token_ids)

    def _run(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(self._embed(token_ids, positions), states, positions, attend)


class StateDrafter(StateContext, LevelDrafter):
    """Drafter whose layers are run once per level."""

    def level_forward(self, rows: LevelRows) -> Callable[[], torch.Tensor]:
        # The root has the position before the anchor, because its state belongs to that position.
        starts = (rows.context_lens - 1).clamp_min(0)
        states = self.root_states(rows.requests)

        def forward() -> torch.Tensor:
            nonlocal states
            # Below the roots, the states are outputs of the previous level.
            hidden, states = self._run(
                rows.token_ids,
                rows.of_parents(states),
                rows.positions(starts),
                rows.cache_attention(self.cache, starts),
            )
            return hidden

        return forward


class Eagle3Context(StateContext):
    """The context of an EAGLE-3 head."""

    head: FusedEagle3Head

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        assert self.options.head_path is not None
        head, extras = load_eagle3_head(self.options.head_path, target.text_config)
        head = head.to(device=target.device, dtype=target.dtype)
        self.config, self.windows = head.config, head.config.windows
        self.take_tables(target, extras.target_ids, extras.embed_tokens)
        self.lm_head = target.make_lm_head(self.target_ids, extras.lm_head)
        self.head = FusedEagle3Head(head, self.options.max_model_len, target.make_linear)
        self.begin_context(self.config.hidden_size)

    def target_outputs(self, committed: CommittedTokens) -> torch.Tensor:
        return committed.layer_states()

    def target_states(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.head.features(outputs)


class Eagle3Drafter(Eagle3Context, StateDrafter):
    """Drafter for EAGLE-3 heads."""


class ParallelDrafter(Eagle3Context, DepthDrafter):
    """Drafter for P-EAGLE heads: one forward drafts all levels, and all nodes of a level have the
    same candidates."""

    def candidates(
        self, requests: DraftRequests | DeviceRequests, depth: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.head.mask_state is not None and self.config.mask_token_id is not None
        self.prepare_context(requests)
        # The anchor's row has the position before the anchor, because its state belongs to that
        # position.
        shifted: DraftRequests | DeviceRequests
        if isinstance(requests, DeviceRequests):
            anchors, starts = requests.anchors, (requests.context_lens - 1).clamp_min(0)
            shifted = replace(requests, context_lens=starts)
        else:
            before = [length - 1 for length in requests.context_lens]
            anchors, starts = device_tensor([requests.anchors, before], self.embed_tokens.device)
            shifted = replace(requests, context_lens=before)
        # Each anchor, and masks after it.
        tokens = torch.full_like(anchors[:, None].expand(-1, depth), self.config.mask_token_id)
        states = self.head.mask_state.repeat(len(requests), depth, 1)
        tokens[:, 0], states[:, 0] = anchors, self.root_states(requests)
        positions = starts[:, None] + torch.arange(depth, device=starts.device)
        positions = positions.clamp_max(self.options.max_model_len - 1).long()
        attend = self.cache.block_attention(shifted, depth, causal=True)
        hidden, _ = self._run(tokens.flatten(), states.flatten(0, 1), positions.flatten(), attend)
        ids, log_probs = self.likeliest(hidden, width)
        return ids.unflatten(0, tokens.shape), log_probs.unflatten(0, tokens.shape)
