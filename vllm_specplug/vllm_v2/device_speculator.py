# SPDX-License-Identifier: Apache-2.0
"""Drafting where memory is the device's.

Where the drafter can (`Drafter.drafts_on_device`), trees are built on the device from what lies
there, n-gram branches included, and nothing is read: what the host wants to know of a step and of
its trees comes in copies that are looked at a step later. An adaptive budget decides by these, too:
where steps are scheduled ahead, trees fill rows that were reserved before, and what the trees of a
step were worth is a reservation for one that is not scheduled yet.

Everything else, and an adaptive budget where the scheduler waits for every tree anyway, hands over
`DraftTree`s, which are arrays of the host. What that needs of a step
comes in one copy, which is waited for once the drafter's context has been launched; the trees go
back in copies that nothing waits for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tensor_model_parallel_world_size

from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_levels import packed_trees
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees, TokenHistory
from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.kernels import to_device
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.step_trees import CommitMap
from vllm_specplug.vllm_attention.full_graphs import wants_full_graphs
from vllm_specplug.vllm_v2 import draft_inputs, host_step
from vllm_specplug.vllm_v2.context_graphs import ContextGraphs
from vllm_specplug.vllm_v2.device_ngrams import DeviceNgrams, Found, keep_history_on_device
from vllm_specplug.vllm_v2.draft_graphs import DraftGraphs, graph_depths
from vllm_specplug.vllm_v2.host_step import (
    HostStep,
    KnownTokens,
    StepCopy,
    TreesCopy,
)
from vllm_specplug.vllm_v2.penalty_processor import device_penalties
from vllm_specplug.vllm_v2.pending_steps import HELD_STEPS, PendingDraft, PendingStep
from vllm_specplug.vllm_v2.speculator import TreeSpeculator
from vllm_specplug.vllm_v2.step_input import HostRequest
from vllm_specplug.vllm_worker.cost.draft_planner import Batch
from vllm_specplug.vllm_worker.cost.late_budget import LateBudget
from vllm_specplug.vllm_worker.ranks import first_rank_tensor


class DeviceSpeculator(TreeSpeculator):
    """Drafts one tree per request of a batch whose state the host has to copy."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self.vllm_config = vllm_config
        self.known: dict[str, KnownTokens] = {}
        # Of running requests: grows with every step by the most tokens that it can give them.
        self.len_upper_bound: dict[str, int] = {}
        # And how many tokens they have at least.
        self.len_lower_bound: dict[str, int] = {}
        # Trees built on the device and their rows, by running request.
        self.copies: dict[str, tuple[TreesCopy, int]] = {}
        self.draft_graphs: DraftGraphs | None = None
        self.context_graphs: ContextGraphs | None = None
        # Steps and drafts that the host has not looked at yet, in their order.
        self._late: deque[PendingStep | PendingDraft] = deque()
        # Made with the first trees: the drafter is loaded, and the budget calibrated, by then.
        self._ngrams: DeviceNgrams | None = None
        self._late_budget: LateBudget | None = None
        # What was planned last, and for how many more steps it holds.
        self._held: PendingDraft | None = None
        self._held_steps = 0
        # The rows that the scheduler was asked for with the last output. What is decided between
        # two drafts is asked for with the next one.
        self._asked: ReservedRows | None = None
        # When the last step was drafted for, and its requests.
        self._paced: tuple[float, list[str]] = (0.0, [])
        if self._may_look_up():
            keep_history_on_device(req_states)

    def _may_look_up(self) -> bool:
        """Whether branches may be looked up on the device, before the drafter is loaded."""
        options = self.proposer.options
        takes_branches = options.tree_width > 1 or options.head_path is None
        is_late = self.spec.tree_budget != "auto" or self.schedules_ahead
        return bool(options.ngram_topk) and takes_branches and is_late

    def warm_up(self) -> None:
        """Compiles what tables and lookups launch. Call once the drafter is loaded."""
        host_step.warm_up(self.req_states, self.store.num_nodes)
        draft_inputs.warm_up(self.req_states)
        if (ngrams := self.ngrams) is not None:
            ngrams.warm_up(self.req_states.all_token_ids.gpu, self.store.num_nodes)

    def add(
        self,
        req_id: str,
        extra_args: dict[str, Any] | None,
        plain: str | None,
        token_ids: Sequence[int],
    ) -> None:
        super().add(req_id, extra_args, plain, token_ids)
        self.known[req_id] = KnownTokens(token_ids)
        # Of what was kept for it nothing holds.
        self.len_upper_bound[req_id] = self.len_upper_bound.get(req_id, 0) + self.max_model_len
        self.len_lower_bound[req_id] = len(token_ids)

    def forget(self, gone: Sequence[str], ended: Sequence[str]) -> None:
        # An engine that goes idle has no later step to count the last ones in.
        self._drain_completed()
        super().forget(gone, ended)
        if self._late_budget is not None:
            self._late_budget.forget(gone)
        for req_id in gone:
            self.known.pop(req_id, None)
            self.len_upper_bound.pop(req_id, None)
            self.len_lower_bound.pop(req_id, None)
            self.copies.pop(req_id, None)

    def tree_of(self, req_id: str) -> DraftTree | None:
        # Asked for by a scheduler that waits, or for a grammar.
        if req_id in self.copies:
            copy, row = self.copies[req_id]
            return copy.read(row)
        return super().tree_of(req_id)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        # vLLM drops the graphs it measured memory with, and comes here again.
        self.draft_graphs = self.context_graphs = None
        drafter = self.proposer.drafter
        if (
            not wants_full_graphs(self.vllm_config)
            or cudagraph_mode.decode_mode() != CUDAGraphMode.FULL
        ):
            return
        if drafter.observes_from_graphs:
            self.context_graphs = ContextGraphs(self.vllm_config, self.device, drafter)
        # Where the scheduler waits for an adaptive budget's trees, the host makes them.
        is_late = self.schedules_ahead or not self.planner.is_adaptive
        if drafter.drafts_from_graphs and is_late:
            # Where there is no forward depth, drafts are always as deep as they may be.
            deepest = drafter.forward_depth or drafter.warmup_depth
            has_depths = self.planner.is_adaptive and drafter.forward_depth > 0
            self.draft_graphs = DraftGraphs(
                self.vllm_config,
                self.device,
                drafter,
                self.proposer.options.tree_width,
                self.store.num_nodes,
                graph_depths(deepest, has_depths),
            )

    def capture(self) -> None:
        if self.context_graphs is not None:
            self.context_graphs.capture_contexts(self.target_graphs().aux_hidden_states)
        if self.draft_graphs is not None:
            self.draft_graphs.capture_drafts()

    @property
    def _reads_nothing(self) -> bool:
        # Not kept: vLLM's warm-up steps come before the budget is calibrated.
        is_late = self.planner.adaptive is None or self.schedules_ahead
        return is_late and self.proposer.drafter.drafts_on_device

    @property
    def ngrams(self) -> DeviceNgrams | None:
        """The branches that are looked up on the device; None for none."""
        drafter = self.proposer.drafter
        if not drafter.drafts_on_device or (branches := drafter.device_branches) is None:
            return None
        if self._ngrams is None:
            # The first branch is the best: where a chain is wanted, it is one.
            count = branches.count if self.proposer.options.tree_width > 1 else 1
            self._ngrams = DeviceNgrams(branches, count, self.max_model_len, self.device)
        return self._ngrams

    def _propose(
        self,
        input_batch: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        most: int,
    ) -> torch.Tensor:
        final = self.step.committed(input_batch)
        width = self.store.num_nodes + 1
        copy = StepCopy(self.req_states, input_batch, self.step.walk, num_sampled, width)
        # A row with logits gives a token at most.
        counts = np.diff(input_batch.cu_num_logits_np[: len(input_batch.req_ids) + 1])
        for req_id, count in zip(input_batch.req_ids, counts.tolist(), strict=True):
            self.len_upper_bound[req_id] += count
        committed = _all_rows(final, aux_hidden_states)
        if self.spec.reads_next_tokens:
            following = self._next_tokens(input_batch, final)
            committed = replace(committed, next_token_ids=following)
        if self.context_graphs is None or not self.context_graphs(committed):
            committed = replace(committed, output_states=last_hidden_states)
            self.proposer.drafter.observe(committed)
        if self._reads_nothing:
            # The next step was scheduled before what comes now.
            self._drain_completed()
            trees = {r: self.copies[r] for r in input_batch.req_ids if r in self.copies}
            source, milliseconds = self._pace(input_batch)
            record = self.step.record(self.planner.running)
            self._late.append(PendingStep(input_batch, copy, trees, record, source, milliseconds))
            drafted = self._draft_on_device(input_batch, num_sampled, most, self._asked)
            self._asked = self.reserved = self._shared(self.reserved)
            return drafted
        read = copy.read()
        self.learn(input_batch, read.walk, read.seq_lens, self.trees)
        return self._draft(input_batch, self._batch(input_batch, read), most)

    def _pace(self, input_batch: Any) -> tuple[str | None, float]:
        """Where the drafts of a step came from, and milliseconds since the step before it; 0 where
        its requests were others, or none of them had a draft."""
        drafter, now = self.proposer.drafter, time.perf_counter()
        (before, req_ids), self._paced = self._paced, (now, list(input_batch.req_ids))
        if drafter.source is None or req_ids != self._paced[1]:
            return drafter.source, 0.0
        return drafter.source, 1e3 * (now - before)

    def _drain_completed(self) -> None:
        """Learns from the steps and decides on the trees whose copies have come."""
        while self._late and self._late[0].has_come:
            late = self._late.popleft()
            if isinstance(late, PendingStep):
                self._learn(late)
            else:
                self._decide(late)

    def _learn(self, late: PendingStep) -> None:
        read = late.copy.read()
        trees = {req_id: copy.read(row) for req_id, (copy, row) in late.trees.items()}
        self.learn(late.input_batch, read.walk, read.seq_lens, trees, late.record)
        sampled = read.sampled.tolist()
        for req_id, total in zip(late.input_batch.req_ids, read.totals.tolist(), strict=True):
            if req_id in self.len_lower_bound:
                self.len_lower_bound[req_id] = max(self.len_lower_bound[req_id], total)
        if late.source is not None and late.milliseconds:
            tokens = sum(sampled) / len(sampled)
            self.proposer.drafter.learn(late.source, tokens, late.milliseconds)
        # Scores of branches are averages: steps that are timed are enough.
        if self._ngrams is None or late.record.walked is None:
            return
        latest = read.latest
        for i, req_id in enumerate(late.input_batch.req_ids):
            if sampled[i] and req_id in late.trees:
                copy, row = late.trees[req_id]
                self._ngrams.learn(copy.branches(row), latest[i, -sampled[i] :])

    def _decide(self, late: PendingDraft) -> None:
        """What trees were worth, as rows of the step that is scheduled next."""
        assert self._late_budget is not None
        copy, rows = late.copy, late.rows
        trees, found = ([some[row] for row in rows] for some in (copy.merged, copy.lookup_only))
        room = [late.room[row] for row in rows]
        wanted = self._late_budget.wanted(late.plan, trees, found, room)
        if late.plan.is_trial:
            self._held_steps = 0
        self._ask_for({**dict.fromkeys(late.decoding, 0), **wanted})

    def _ask_for(self, nodes: dict[str, int]) -> None:
        running = {req_id: count for req_id, count in nodes.items() if req_id in self.known}
        if running:
            self.reserved = ReservedRows.of(running)

    def _draft_on_device(
        self, input_batch: Any, num_sampled: torch.Tensor, most: int, reserved: ReservedRows | None
    ) -> torch.Tensor:
        """Trees from what lies on the device: kept, and their token ids int64 [R, N].

        Args:
            reserved: what the next step was asked to have rows for.
        """
        start = self.planner.clock.mark()
        states, slots = self.req_states, input_batch.idx_mapping.long()
        budgets = self._budgets(input_batch, most)
        room = self._rows_of(input_batch, budgets, reserved)
        longest = np.minimum(states.max_seq_len[input_batch.idx_mapping_np], self.max_model_len)
        late = self._plan(input_batch, budgets, longest, room)
        forward = budgets if late is None else late.forward_depths(len(budgets))
        limits = to_device(
            np.stack([budgets, longest.astype(np.int32), room, forward]), self.device
        )
        inputs = draft_inputs.draft_inputs(states, slots, num_sampled, limits)
        requests = DeviceRequests(
            anchors=inputs.anchors,
            context_lens=inputs.context_lens,
            budgets=inputs.budgets,
            depths=inputs.depths,
            width=self.proposer.options.tree_width,
            num_nodes=self.store.num_nodes,
            max_context=int(input_batch.seq_lens_cpu_upper_bound.max()),
            history=self._history(input_batch, budgets, slots),
        )
        found: Found | None = None
        trees: DeviceTrees | None = None
        lookup_only: DeviceTrees | None = None
        if budgets.any():
            depths = inputs.forward_depths
            trees = self._own_trees(requests, None if late is None else forward, depths)
            if (ngrams := self.ngrams) is not None:
                history = states.all_token_ids.gpu
                found = ngrams.lookup(history, slots, inputs.lengths, requests)
                decides = late is not None and not late.is_held
                trees, *others = ngrams.merged(trees, found, requests, lookup_only=decides)
                lookup_only = others[0] if others else None
        if trees is None:
            trees = DeviceTrees.none(len(requests), self.store.num_nodes, self.device)
        # Ranks may differ in what they decided, and none in whether it drafts at all.
        fits = limits[2]
        if budgets.any():
            trees, fits = _first_rank(trees, fits)
        copy = TreesCopy(trees, fits, lookup_only, found)
        for row, req_id in enumerate(input_batch.req_ids):
            self.copies[req_id] = copy, row
        if late is None:
            self.planner.drafted_on_device(start, (0, 0.0))
            self.stats.tree_budget = int(budgets.max(initial=0))
            if self.schedules_ahead:
                self.reserved = self._fixed_rows(self._decoding_nodes(input_batch, budgets))
        else:
            asked = forward[forward > 0]
            depth = float(asked.mean()) if len(asked) else 0.0
            self.planner.drafted_on_device(start, (len(asked), depth))
            if late.rows:
                if not late.is_held:
                    self._late.append(replace(late, _copy=copy))
            else:
                self._ask_for(dict.fromkeys(late.decoding, 0))
        return self.store.put(
            slots, inputs.roots, trees.token_ids, trees.parents, trees.counts, trees.scores, fits
        )

    def _decoding_nodes(self, input_batch: Any, budgets: np.ndarray) -> dict[str, int]:
        """Budgets by request; of those whose prompt goes on nothing is known."""
        decoding = self._is_decoding(input_batch).tolist()
        rows = zip(input_batch.req_ids, budgets.tolist(), decoding, strict=True)
        return {req_id: nodes for req_id, nodes, decodes in rows if decodes}

    def _is_decoding(self, input_batch: Any) -> np.ndarray:
        """bool [R]: whether a request's prompt is done after this step."""
        ends = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        return ends >= self.req_states.prefill_len.np[input_batch.idx_mapping_np]

    def _own_trees(
        self,
        requests: DeviceRequests,
        # [R] on the host; 0 for no forward, None for one of any depth
        forward_depths: np.ndarray | None,
        # [R] on the device, none deeper than the request's tree
        depths: torch.Tensor,
    ) -> DeviceTrees | None:
        """Those of the drafter; None for none."""
        if forward_depths is None or not self.proposer.drafter.forward_depth:
            return self._drafted(requests, None)
        chosen = np.flatnonzero(forward_depths)
        if not len(chosen):
            return None
        requests = replace(requests, depths=depths, deepest=int(forward_depths.max()))
        return self._drafted(requests, None if len(chosen) == len(requests) else chosen)

    def _drafted(
        self,
        requests: DeviceRequests,
        # int64, lines of those to draft for; None for all
        chosen: np.ndarray | None,
    ) -> DeviceTrees | None:
        drafter = self.proposer.drafter
        if self.draft_graphs is not None:
            trees = self.draft_graphs(requests, chosen)
            if trees is not None:
                return trees
        if chosen is None:
            return drafter.propose_on_device(requests)
        rows = to_device(chosen, self.device)
        trees = drafter.propose_on_device(requests.some(rows, chosen.tolist()))
        return None if trees is None else trees.spread(rows, len(requests))

    def _history(
        self, input_batch: Any, budgets: np.ndarray, slots: torch.Tensor
    ) -> TokenHistory | None:
        if not self.proposer.drafter.reads_history:
            return None
        req_ids = list(input_batch.req_ids)
        bounds = input_batch.seq_lens_cpu_upper_bound[: len(req_ids)]
        return TokenHistory(
            self.req_states.all_token_ids.gpu,
            slots,
            req_ids,
            [self.len_upper_bound[req_id] for req_id in req_ids],
            (budgets > 0).tolist(),
            # Without the anchor; what the forward emits comes behind its tokens.
            least=[self.len_lower_bound[req_id] - 1 for req_id in req_ids],
            most=bounds.tolist(),
            penalties=device_penalties(
                [self.penalties.get(req_id) for req_id in req_ids], self.req_states, slots
            ),
        )

    def _rows_of(
        self, input_batch: Any, budgets: np.ndarray, reserved: ReservedRows | None
    ) -> np.ndarray:
        """Nodes of each request that the next step has rows for, int32 [R]."""
        if reserved is None:
            return budgets
        nodes = [reserved.nodes(req_id) for req_id in input_batch.req_ids]
        return np.minimum(budgets, np.array(nodes, np.int32))

    def _plan(
        self, input_batch: Any, budgets: np.ndarray, longest: np.ndarray, room: np.ndarray
    ) -> PendingDraft | None:
        """What an adaptive budget decides before drafting; None under a fixed one."""
        planner = self.planner
        if planner.adaptive is None:
            return None
        req_ids = list(input_batch.req_ids)
        held = self._held
        if held is not None and self._held_steps and held.is_for(req_ids, budgets):
            self._held_steps -= 1
            planner.adaptive.repeat(held.plan)
            self.stats.observe_plain("budget", int(np.count_nonzero(room[held.rows] == 0)))
            return replace(held, room=room.tolist(), is_held=True)
        self._held = None
        deepest = self.proposer.drafter.forward_depth
        if self._late_budget is None:
            self._late_budget = LateBudget(planner, deepest)
        ends = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        prompts = self.req_states.prefill_len.np[input_batch.idx_mapping_np]
        is_decoding = ends >= prompts
        # Of requests that decode the least: those of the steps that the host has looked at. An
        # upper bound has every draft of two steps, and would end drafting that much too early.
        least = [self.len_lower_bound[req_id] for req_id in req_ids]
        tokens = np.where(is_decoding, least, ends)
        batch = Batch(int(is_decoding.sum()), int(tokens[is_decoding].sum()))
        for start, prompt in zip(ends[~is_decoding], prompts[~is_decoding], strict=True):
            rows = max(0, min(int(prompt - start), self.max_num_tokens - batch.num_roots))
            batch.other_rows += rows
            batch.other_context += rows * (int(start) + rows // 2)
        rows = np.flatnonzero(budgets).tolist()
        plan = None
        if rows:
            plan = self._late_budget.plan(
                [req_ids[row] for row in rows],
                tokens[rows].tolist(),
                budgets[rows].tolist(),
                np.minimum(budgets, longest - tokens - 1)[rows].tolist(),
                batch,
            )
        decoding = [req_ids[row] for row in np.flatnonzero(is_decoding)]
        late = PendingDraft(plan, rows, decoding, room.tolist(), req_ids, budgets)
        if plan is not None and is_decoding.all() and plan.depths.any() and not plan.is_trial:
            self._held, self._held_steps = late, HELD_STEPS
        return late

    def _budgets(self, input_batch: Any, most: int) -> np.ndarray:
        """Most nodes of each request's next tree, int32 [R], as far as the host knows."""
        # Upper bounds of requests that decode; of prompts they are exact.
        ends = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        is_decoding = self._is_decoding(input_batch)
        running = int(is_decoding.sum())
        budgets = np.zeros(len(ends), np.int32)
        for i, req_id in enumerate(input_batch.req_ids):
            if not is_decoding[i]:
                continue
            if req_id in self.plain:
                self.stats.observe_plain(self.plain[req_id])
                continue
            nodes, reason = self.planner.nodes_for(
                req_id, self.extra_args.get(req_id), int(ends[i]), running
            )
            if nodes > most:
                nodes, reason = most, "batch"
            if nodes < 1:
                self.stats.observe_plain(reason)
            budgets[i] = max(nodes, 0)
        return budgets

    def _next_tokens(self, input_batch: Any, final: CommitMap) -> torch.Tensor:
        """The token after each row's, int64 [T]; 0 where none is known."""
        counts = torch.diff(input_batch.query_start_loc[: input_batch.num_reqs + 1])
        slots = torch.repeat_interleave(
            input_batch.idx_mapping.long(), counts, output_size=len(final.positions)
        )
        after = final.positions.long() + 1
        is_known = after < self.req_states.total_len.gpu[slots]
        found = self.req_states.all_token_ids.gpu[slots, after.clamp_max(self.max_model_len - 1)]
        return torch.where(is_known, found, 0).long()

    def _batch(self, input_batch: Any, read: HostStep) -> list[HostRequest]:
        totals, computed = read.totals.tolist(), read.computed.tolist()
        sampled, latest = read.sampled.tolist(), read.latest
        batch = []
        for i, req_id in enumerate(input_batch.req_ids):
            known, slot = self.known[req_id], int(input_batch.idx_mapping_np[i])
            if sampled[i]:
                known.add(latest[i, -sampled[i] :])
            if known.count != totals[i]:
                # A request that was given more tokens meanwhile.
                tokens = self.req_states.all_token_ids.gpu[slot, : totals[i]].cpu()
                known = self.known[req_id] = KnownTokens(tokens.numpy())
            batch.append(
                HostRequest(
                    req_id=req_id,
                    index=i,
                    token_ids=known.tokens,
                    max_len=int(self.req_states.max_seq_len[slot]),
                    is_decoding=sampled[i] > 0,
                    num_computed=computed[i],
                )
            )
        return batch


def _first_rank(trees: DeviceTrees, room: torch.Tensor) -> tuple[DeviceTrees, torch.Tensor]:
    """The first tensor parallel rank's trees and rows, on every rank."""
    if get_tensor_model_parallel_world_size() == 1:
        return trees, room
    first = first_rank_tensor(torch.cat([packed_trees(trees), room[:, None]], dim=1))
    token_ids, parents, depths, scores = first[:, 1:-1].chunk(4, dim=1)
    trees = DeviceTrees(
        token_ids.long(), parents, depths, scores.contiguous().view(torch.float32), first[:, 0]
    )
    return trees, first[:, -1]


def _all_rows(final: CommitMap, aux_hidden_states: list[torch.Tensor] | None) -> CommittedTokens:
    """What a drafter observes: every row of the forward. Those that committed nothing have no slot,
    and kernels that write caches pass over them; which they are is only known on the device."""
    return CommittedTokens(
        aux_hidden_states=aux_hidden_states or [],
        rows=final.computed_rows,
        positions=final.positions,
        slots=final.slots,
        last_rows=final.last_rows,
    )


def make_device_speculator(stock: Any) -> Any:
    """`init_speculator` of a runner that verifies trees on a device. Seam: device_speculator."""
    return DeviceSpeculator
