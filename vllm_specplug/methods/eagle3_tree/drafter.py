# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 trees: the head is run once per level, over the frontier of all trees.

The context's keys and values are those of committed tokens, each with the token after it; they are
computed before a draft needs them, many at once. A drafted node attends them and its own branch,
and takes its parent's state: every branch is what the head would draft as a chain along it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar, cast

import numpy as np
import torch

from vllm_specplug.drafting.caches import BranchCache, DeviceCache, DraftCache, DraftCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_levels import (
    DeviceFrontier,
    LevelRows,
    draft_levels_on_device,
    level_candidates,
    most_frontier_width,
    read_trees,
)
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.drafting.head_drafter import HeadDrafter
from vllm_specplug.drafting.host_levels import HostLevelRows
from vllm_specplug.drafting.late_context import LateContextDrafter
from vllm_specplug.drafting.ngram import ngram_branches
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.kernels import top_candidates
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head
from vllm_specplug.methods.eagle3_tree.head import Attend, FusedDraftLayer, FusedEagle3Head
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.beam import (
    FRONTIER_WIDTH,
    Expand,
    Frontier,
    draft_level_by_level,
)


class StateDrafter(LateContextDrafter, HeadDrafter):
    """A layer over a token's embedding and the state before it.

    Subclasses set the attributes below in `load`, and end it with `begin_context`.
    """

    frontier_width: ClassVar[int] = FRONTIER_WIDTH
    """Most nodes of one tree whose children are drafted per level. The default is best-first for
    node budgets up to 16 and close to it above."""
    head: FusedDraftLayer
    # [V, H]
    embed_tokens: torch.Tensor
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    # [V'] target id of each draft id, where the draft vocabulary is reduced
    target_ids: torch.Tensor | None
    draft_vocab_size: int
    # [B, H] states of each request's last committed position, in batch order
    _roots: torch.Tensor
    # [B] where the rows of those positions lie among the tokens that wait, from the end; None when
    # `_roots` is up to date
    _root_rows: torch.Tensor | None
    # [B, C] what `_roots` are to be made of, where tokens were put off; None when they are
    _root_outputs: torch.Tensor | None
    is_device_cache = False
    """Whether the cache is a `DeviceCache`: levels are then drafted without the host."""

    def begin_context(self, hidden_size: int) -> None:
        """Sets up what is kept of committed tokens; `hidden_size` is that of their states."""
        self.begin_backlog(self.embed_tokens.device, self._write_context)
        self._roots = self.embed_tokens.new_zeros(0, hidden_size)
        self._root_rows = self._root_outputs = None

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
        outputs = self.target_outputs(committed)
        if committed.last_rows is not None:
            last = committed.last_rows.to(rows.device)
            # Of a device rows are in no order; those that were not accepted repeat their root's.
            root_rows = (rows == last[:, None]).int().argmax(1) - len(rows)
            self._root_rows = self._root_outputs = None
            if self.backlog.is_deferring:
                # Other tokens may be written before these, or instead of them.
                self._root_outputs = outputs[root_rows]
            else:
                self._root_rows = root_rows
        self.backlog.add(
            outputs, following, committed.positions, committed.slots,
            req_ids=committed.req_ids, owners=committed.owners,
        )  # fmt: skip

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
        if self._root_rows is not None:
            self._roots, self._root_rows = states[self._root_rows], None

    def bind_cache(self, cache: DraftCache) -> None:
        super().bind_cache(cache)
        self.is_device_cache = hasattr(cache, "tree_attention")

    def draft(self, requests: DraftRequests) -> list[DraftTree]:
        self.backlog.write(requests.req_ids)
        depths = [min(depth, self.options.tree_depth) for depth in requests.depths]
        if self.is_device_cache:
            self.levels_run = max(depths)
            return read_trees(self._draft_for_host(requests, depths))
        return draft_level_by_level(
            requests.anchors,
            requests.budgets,
            depths,
            requests.widths,
            self.counted(self._expander(requests)),
            min_node_prob=requests.min_node_prob,
            min_level_prob=requests.min_level_prob,
            frontier_width=self.frontier_width,
        )

    @property
    def drafts_on_device(self) -> bool:
        return self.is_device_cache

    @property
    def drafts_from_graphs(self) -> bool:
        return True

    @property
    def request_states(self) -> torch.Tensor:
        if self._root_outputs is not None:
            self._roots, self._root_outputs = self.target_states(self._root_outputs), None
        return self._roots

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees:
        self.backlog.flush()
        roots, levels = self.request_states, self.options.tree_depth
        if requests.states is not None:
            roots = requests.states
        if len(roots) and requests.rows is not None:
            roots = roots[requests.rows]
        if len(roots) != len(requests):
            # A draft that no step came before.
            roots = roots.new_zeros(len(requests), self.embed_tokens.shape[1])
        if requests.deepest is not None:
            levels = min(levels, requests.deepest)
        return self._draft_on_device(
            requests,
            roots,
            requests.anchors,
            requests.context_lens,
            requests.budgets,
            requests.depths,
            num_levels=levels,
            width=requests.width,
        )

    def _draft_for_host(self, requests: DraftRequests, depths: list[int]) -> DeviceTrees:
        columns = (
            requests.anchors, requests.context_lens, requests.budgets, depths, requests.widths
        )  # fmt: skip
        *given, widths = device_tensor(np.array(columns), self.embed_tokens.device)
        # Not the widest: see `num_nodes` below.
        return self._draft_on_device(
            requests, self._root_states(requests), *given, num_levels=max(depths),
            width=self.options.tree_width, widths=widths,
        )  # fmt: skip

    def _draft_on_device(
        self,
        requests: DraftRequests | DeviceRequests,
        # [R, H]
        roots: torch.Tensor,
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
        """`draft_level_by_level` without a read on the host."""
        options = self.options
        expander = DeviceLevels(self, requests, roots, context_lens, width)
        return draft_levels_on_device(
            anchors,
            budgets,
            depths,
            expander.expand,
            num_levels=num_levels,
            # Not the largest budget: kernels have variants by the rows of a level, and start-up
            # compiles those of whole trees.
            num_nodes=options.num_nodes,
            width=width,
            widths=widths,
            frontier_width=min(self.frontier_width, most_frontier_width(options.tree_depth)),
        )

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, H] of the tokens after `positions`."""
        # A prompt may hold ids of the tokenizer past the target's vocabulary: vLLM's padded table
        # embeds them, this one ends before. Any row will do for a draft.
        return self.embed_tokens[token_ids.clamp(0, len(self.embed_tokens) - 1)]

    def _root_states(self, requests: DraftRequests) -> torch.Tensor:
        """[R, H]; zeros in drafts that no step came before."""
        roots = self.request_states
        if max(requests.req_indices) >= len(roots):
            return self.embed_tokens.new_zeros(len(requests), self.embed_tokens.shape[1])
        return roots[device_tensor(requests.req_indices, roots.device)]

    def _expander(self, requests: DraftRequests) -> Expand:
        device = self.embed_tokens.device
        rows = HostLevelRows(len(requests))
        # The root's row stands at the position before the anchor: its state is of that position.
        starts = [length - 1 for length in requests.context_lens]
        first = np.array(starts)
        width = min(max(requests.widths), self.draft_vocab_size)
        states = self._root_states(requests)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            attention = cast(BranchCache, self.cache).branch_attention(
                requests, starts, rows.branches.parent_arrays()
            )
            return rows.attend(partial(attention, 0), query, key, value)

        def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
            nonlocal states
            rows.add(frontier)
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


class DeviceLevels:
    """A draft on the device, level by level: what its expanded nodes left there.

    Rows of one request lie together: its root, then the entries of every frontier.
    """

    def __init__(
        self,
        drafter: StateDrafter,
        requests: DraftRequests | DeviceRequests,
        # [R, H]
        roots: torch.Tensor,
        # [R]
        context_lens: torch.Tensor,
        width: int,
    ) -> None:
        self.drafter, self.requests, self.states = drafter, requests, roots
        # The root's row stands at the position before the anchor: its state is of that position.
        self.starts = (context_lens - 1).clamp_min(0)
        self.width = min(width, drafter.draft_vocab_size)
        self.rows = LevelRows()

    def expand(self, frontier: DeviceFrontier) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DeviceExpand`."""
        drafter, depth, shape = self.drafter, frontier.depth, frontier.token_ids.shape
        states = self.states
        if depth:
            # Below the roots, states are those that the level before put out.
            states = states[frontier.rows_in(self.rows.width)]
        self.rows.add(frontier)
        last = drafter.options.max_model_len - 1
        positions = (self.starts + depth).clamp_max(last).long().repeat_interleave(shape[1])
        tokens = frontier.token_ids.flatten()
        hidden, self.states = drafter._run(tokens, states, positions, self._attend)
        ids, log_probs = level_candidates(
            hidden, drafter.lm_head, drafter.draft_vocab_size, self.width
        )
        ids = ids if drafter.target_ids is None else drafter.target_ids[ids]
        return ids.unflatten(0, shape), log_probs.unflatten(0, shape)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache = cast(DeviceCache, self.drafter.cache)

        def attention(parents: torch.Tensor) -> Callable[..., torch.Tensor]:
            return partial(cache.tree_attention(self.requests, self.starts, parents), 0)

        return self.rows.attend(attention, query, key, value)


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
        self.begin_context(self.config.hidden_size)

    def target_outputs(self, committed: CommittedTokens) -> torch.Tensor:
        return committed.layer_states()

    def target_states(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.head.features(outputs)
