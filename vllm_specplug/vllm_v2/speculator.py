# SPDX-License-Identifier: Apache-2.0
"""The speculator that V2 calls: it drafts trees with the method's drafter.

Drafters return `DraftTree`s, which are arrays on the host. On a CPU the tensors are in the host's
memory too, so reading them waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specplug.budget.adaptive_budget import Batch
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.kernels import to_device
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.step_trees import CommitMap, TreeStore, Walk
from vllm_specplug.vllm_v2.penalty_processor import draft_penalties, request_penalty
from vllm_specplug.vllm_v2.step_context import StepContext, StepRecord
from vllm_specplug.vllm_v2.step_input import (
    HostBatch,
    verified_step,
)
from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner
from vllm_specplug.vllm_worker.proposer import DrafterHost
from vllm_specplug.vllm_worker.ranks import (
    each_rank_schedules,
    first_rank_reservation,
    first_rank_trees,
)

if TYPE_CHECKING:
    from vllm_specplug.metrics.step_stats import StepStats


class TreeSpeculator(BaseSpeculator):
    """Drafts one tree per request of a batch. `start` completes its construction."""

    supports_mm_inputs = False
    # vLLM reads it to accept drafts by probability; the walk compares tokens.
    draft_logits = None
    # vLLM sets it.
    pcp_manager: Any = None

    proposer: DrafterHost
    store: TreeStore
    planner: DraftPlanner
    stats: StepStats
    step: StepContext

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        spec = vllm_config.speculative_config
        self.spec = spec
        self.device = device
        self.req_states = req_states
        self.max_model_len: int = vllm_config.model_config.max_model_len
        # The same trees on the host, by running request.
        self.trees: dict[str, DraftTree] = {}
        # Rows that a scheduler that works ahead is asked to reserve for the step after the next
        # one; None if it waits for trees.
        self.reserved: ReservedRows | None = None
        self.schedules_ahead = bool(vllm_config.scheduler_config.async_scheduling)
        self.each_rank_schedules = each_rank_schedules(vllm_config.parallel_config)
        # Of running requests: `extra_args`, and the reason for not drafting, if any.
        self.extra_args: dict[str, dict[str, Any] | None] = {}
        self.plain: dict[str, str] = {}
        # Window and theta of running requests with a contextual penalty.
        self.penalties: dict[str, tuple[int, float]] = {}
        # Requests for which the drafter's `begin` was called.
        self.begun: set[str] = set()
        self.max_num_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens

    def start(self, runner: Any) -> None:
        """Takes what exists only once the runner is complete."""
        self.proposer, self.store = runner.drafter, runner.tree_store
        self.planner, self.stats, self.step = runner.planner, runner.tree_metrics.stats, runner.step
        self.target_graphs: Callable[[], Any] = lambda: runner.cudagraph_manager

    # -- requests that come and go -----------------------------------------------------------

    def add(
        self,
        req_id: str,
        extra_args: dict[str, Any] | None,
        plain: str | None,
        token_ids: Sequence[int],
    ) -> None:
        """Adds a request that starts, or comes back after preemption.

        Args:
            plain: why it may not have drafts, as one of the metrics' reasons; None if it may.
            token_ids: its known tokens.
        """
        self.extra_args[req_id] = extra_args
        self.plain.pop(req_id, None)
        if plain is not None:
            self.plain[req_id] = plain
        self.penalties.pop(req_id, None)
        if (penalty := request_penalty(extra_args)) is not None:
            self.penalties[req_id] = penalty

    def forget(self, gone: Sequence[str], ended: Sequence[str]) -> None:
        """Drops the state of requests in `gone`, which no longer run. Requests in `ended` do not
        come back."""
        self.proposer.drafter.forget(gone)
        self.planner.forget(ended)
        self.begun.difference_update(gone)
        if self.reserved is not None:
            self.reserved = self.reserved.without(gone)
        for req_id in gone:
            self.extra_args.pop(req_id, None)
            self.plain.pop(req_id, None)
            self.penalties.pop(req_id, None)
            self.trees.pop(req_id, None)

    def tree_of(self, req_id: str) -> DraftTree | None:
        """Returns a running request's tree on the host; None if none was drafted."""
        return self.trees.get(req_id)

    def tree_nodes(self, req_ids: Sequence[str]) -> Callable[[], dict[str, int]]:
        """Returns a function that gives the number of nodes of each request's tree.

        Call the function once the step that verifies these trees has run.
        """
        counts = {r: self.trees[r].num_nodes for r in req_ids if r in self.trees}
        return lambda: counts

    # -- V2's interface ------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Draft forwards are not captured."""

    def capture(self) -> None:
        """Draft forwards are not captured."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns token ids int64 [R, N] of the next trees and keeps their parents in the store.

        `num_speculative_tokens` is the number of nodes per request that the next step has rows for.
        """
        if dummy_run:
            shape = (input_batch.num_reqs, self.store.num_nodes)
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        most = self.store.num_nodes if num_speculative_tokens is None else num_speculative_tokens
        return self._propose(input_batch, last_hidden_states, aux_hidden_states, num_sampled, most)

    def _propose(
        self,
        input_batch: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        most: int,
    ) -> torch.Tensor:
        req_ids = list(input_batch.req_ids)
        self._observe(input_batch, req_ids, last_hidden_states, aux_hidden_states)
        states, slots = self.req_states, input_batch.idx_mapping_np
        tokens = states.all_token_ids.gpu.numpy()
        batch = HostBatch(
            req_ids,
            [tokens[slot] for slot in slots],
            states.total_len.gpu.numpy()[slots],
            states.max_seq_len[slots],
            states.num_computed_tokens.gpu.numpy()[slots],
            num_sampled.numpy(),
        )
        return self._draft(input_batch, batch, most)

    def _observe(
        self,
        input_batch: Any,
        req_ids: list[str],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
    ) -> None:
        """Shows the drafter what the step committed, without rows that committed nothing."""
        drafter = self.proposer.drafter
        final = self.step.committed(input_batch)
        following = self._next_tokens(input_batch, final)
        starts = input_batch.query_start_loc_np[: len(req_ids) + 1]
        kept = final.slots >= 0
        drafter.observe(
            CommittedTokens(
                aux_hidden_states=aux_hidden_states or [],
                rows=final.computed_rows[kept],
                positions=final.positions[kept],
                slots=final.slots[kept],
                last_rows=final.last_rows,
                next_token_ids=None if following is None else following[kept],
                output_states=last_hidden_states,
                req_ids=req_ids,
                owners=np.arange(len(req_ids)).repeat(np.diff(starts))[kept.numpy()],
            )
        )
        for i, req_id in enumerate(req_ids):
            if req_id not in self.begun:
                self.begun.add(req_id)
                # A request's first step has no drafts, so its rows are in the order of positions.
                drafter.begin(req_id, i, int(final.positions[starts[i]]))

    def _next_tokens(self, input_batch: Any, final: CommitMap) -> torch.Tensor | None:
        """Returns int64 [T]: the token that follows each row's token, 0 if it is not known. None
        for a drafter that does not read them."""
        if not self.spec.reads_next_tokens:
            return None
        counts = torch.diff(input_batch.query_start_loc[: input_batch.num_reqs + 1])
        slots = torch.repeat_interleave(
            input_batch.idx_mapping.long(), counts, output_size=len(final.positions)
        )
        after = final.positions.long() + 1
        is_known = after < self.req_states.total_len.gpu[slots]
        found = self.req_states.all_token_ids.gpu[slots, after.clamp_max(self.max_model_len - 1)]
        return torch.where(is_known, found, 0).long()

    def learn(
        self,
        input_batch: Any,
        walk: Walk | None,
        seq_lens: torch.Tensor | np.ndarray,
        trees: Mapping[str, DraftTree],
        record: StepRecord | None = None,
    ) -> None:
        """Counts a step's trees, and learns from them and from the step's duration.

        Args:
            walk: in the host's memory, like `seq_lens`; None in a step without drafts.
            trees: the trees that the step verified, before they were cut to what was scheduled.
            record: the record of a step that may be over; None for the running step.
        """
        record = record or self.step.record(self.planner.running)
        step = verified_step(input_batch, trees, walk, seq_lens)
        step_nodes = 0
        for r in step:
            if r.tree.num_nodes:
                self.stats.observe_draft(r.tree.num_nodes, len(r.accepted_path))
                step_nodes += r.tree.num_nodes
        self.planner.observe(step, input_batch.req_ids, record.walked, record.running)
        if step_nodes:
            self.stats.step_nodes.append(step_nodes)
            compacted = partial(self.stats.observe_ms, "compact")
            self.planner.clock.measure(record.walked, record.compacted, compacted)

    def _draft(self, input_batch: Any, batch: HostBatch, most: int) -> torch.Tensor:
        """Drafts for a batch on the host, keeps the trees of up to `most` nodes and returns their
        token ids int64 [R, N]."""
        drafter = self.proposer.drafter
        requests, others = self._draft_requests(batch, most)
        if self.penalties:
            slots = input_batch.idx_mapping.long()[requests.req_indices]
            asked = [self.penalties.get(req_id) for req_id in requests.req_ids]
            longest = 1 + max(requests.context_lens, default=0)
            penalties = draft_penalties(asked, self.req_states, slots, longest)
            requests = replace(requests, penalties=penalties)
        drafted = self.planner.draft(drafter, requests, others, self._room(requests))
        drafted = first_rank_trees(drafted, requests.budgets)
        trees = [DraftTree.empty()] * len(batch.req_ids)
        for i, tree in zip(requests.req_indices, drafted, strict=True):
            trees[i] = tree
        self.trees.update(zip(batch.req_ids, trees, strict=True))
        self._reserve(requests, batch)
        return self._store(input_batch, batch, trees)

    def _room(self, requests: DraftRequests) -> list[int] | None:
        """Returns for how many nodes of each request the next step has rows; None if that was not
        decided before."""
        if self.reserved is None:
            return None
        return [
            min(most, self.reserved.nodes(req_id))
            for req_id, most in zip(requests.req_ids, requests.budgets, strict=True)
        ]

    def _reserve(self, requests: DraftRequests, batch: HostBatch) -> None:
        """Sets the rows to reserve for the step after the next one. Ranks may decide differently:
        see `_shared`."""
        if not self.schedules_ahead:
            return
        sampled = zip(batch.req_ids, batch.sampled.tolist(), strict=True)
        nodes = {req_id: 0 for req_id, count in sampled if count}
        if self.planner.adaptive is None:
            nodes.update(zip(requests.req_ids, requests.budgets, strict=True))
            self.reserved = self._fixed_rows(nodes)
            return
        nodes.update(zip(requests.req_ids, self.planner.wanted, strict=True))
        self.reserved = self._shared(ReservedRows.of(self._with_others(nodes)))

    def _shared(self, reserved: ReservedRows | None) -> ReservedRows | None:
        """Returns what a step's output asks the scheduler for: `reserved`, or the first rank's
        reservation if every rank has its own scheduler.

        Schedulers that reserve different rows never agree again. Call this once per step on every
        rank, or on none. Fixed budgets are equal on all ranks.
        """
        if not self.each_rank_schedules or self.planner.adaptive is None:
            return reserved
        # In the order in which they began.
        return first_rank_reservation(reserved, list(self.extra_args))

    def _fixed_rows(self, nodes: dict[str, int]) -> ReservedRows:
        """Returns the rows of fixed budgets by request. New requests keep the maximum that vLLM
        reserves, as their budget is not known yet."""
        return ReservedRows(self._with_others(nodes), self.store.num_nodes)

    def _with_others(self, nodes: dict[str, int]) -> dict[str, int]:
        """Returns `nodes`, and for all other requests their last reservation. With pipeline
        parallelism a batch has only some of the running requests."""
        return nodes if self.reserved is None else {**self.reserved.by_request, **nodes}

    def _store(self, input_batch: Any, batch: HostBatch, trees: list[DraftTree]) -> torch.Tensor:
        shape = (len(trees), self.store.num_nodes)
        if not any(tree.num_nodes for tree in trees):
            self.store.clear(input_batch.idx_mapping.long())
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        token_ids = np.zeros(shape, np.int64)
        parents = np.full(shape, -1, np.int32)
        scores = np.zeros(shape, np.float32)
        for i, tree in enumerate(trees):
            n = tree.num_nodes
            token_ids[i, :n] = tree.token_ids
            parents[i, :n] = tree.parent_indices
            scores[i, :n] = tree.scores
        counts = np.array([tree.num_nodes for tree in trees], np.int32)
        # The last sampled token is the next root.
        roots = np.where(batch.sampled > 0, batch.totals - 1, -1).astype(np.int32)
        arrays = (roots, token_ids, parents, counts, scores)
        tensors = (to_device(array, self.device) for array in arrays)
        return self.store.put(input_batch.idx_mapping, *tensors)

    def _max_nodes(self, req_id: str, num_running: int, most: int) -> tuple[int, str]:
        """Returns the maximum nodes of a request's tree, at most `most`, and the reason if that is
        0."""
        if req_id in self.plain:
            return 0, self.plain[req_id]
        nodes, reason = self.planner.nodes_for(req_id, self.extra_args.get(req_id), num_running)
        return (most, "batch") if nodes > most else (nodes, reason)

    def _draft_requests(self, batch: HostBatch, most: int) -> tuple[DraftRequests, Batch]:
        """Returns the requests to draft for, each with its limits (at most `most` nodes), and the
        rest of the next step."""
        requests = DraftRequests(width=self.proposer.options.tree_width)
        others = Batch(num_roots=int(np.count_nonzero(batch.sampled)))
        columns = batch.totals, batch.max_lens, batch.computed, batch.sampled
        lines = zip(batch.req_ids, *(column.tolist() for column in columns), strict=True)
        for i, (req_id, num_tokens, max_len, computed, sampled) in enumerate(lines):
            if not sampled:
                others.add_prompt(computed, num_tokens - computed, self.max_num_tokens)
                continue
            others.root_context += num_tokens
            nodes, reason = self._max_nodes(req_id, others.num_roots, most)
            # The next step always emits one token besides the accepted drafts.
            depth = min(min(self.max_model_len, max_len) - num_tokens - 1, nodes)
            if depth < 1:
                self.stats.observe_plain(reason if nodes < 1 else "near_max_len")
                continue
            requests.req_ids.append(req_id)
            requests.token_ids.append(batch.tokens[i][:num_tokens])
            requests.context_lens.append(num_tokens - 1)
            requests.req_indices.append(i)
            requests.budgets.append(nodes)
            requests.depths.append(depth)
        return requests, others
