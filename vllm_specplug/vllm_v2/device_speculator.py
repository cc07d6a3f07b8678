# SPDX-License-Identifier: Apache-2.0
"""Drafting on a device whose memory the host cannot read.

If the drafter supports it (`Drafter.drafts_on_device`), the device builds the trees, n-gram
branches included. The host reads asynchronous copies of a step and of its trees one step later. An
adaptive budget decides from these copies. Where steps are scheduled ahead, the host waits for
nothing: trees fill rows that were reserved before they were drafted, and the value of a step's
trees sets the reservation of the next step that is not scheduled yet. Where the scheduler waits for
the trees, so does an adaptive budget, which then cuts them.

All other drafters build `DraftTree`s on the host, which waits for a copy of the step and of its
requests' tokens. The trees return in copies that nothing waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tensor_model_parallel_world_size

from vllm_specplug.budget.adaptive_budget import Batch
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_levels import packed_trees
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees, TokenHistory
from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.kernels import to_device
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_attention.full_graphs import wants_full_graphs
from vllm_specplug.vllm_v2 import draft_inputs, host_step
from vllm_specplug.vllm_v2.context_graphs import ContextGraphs
from vllm_specplug.vllm_v2.device_ngrams import DeviceNgrams, Found, keep_history_on_device
from vllm_specplug.vllm_v2.draft_graphs import DraftGraphs, graph_depths
from vllm_specplug.vllm_v2.host_step import HostStep, StepCopy, TreesCopy
from vllm_specplug.vllm_v2.penalty_processor import draft_penalties
from vllm_specplug.vllm_v2.pending_steps import HELD_STEPS, PendingDraft, PendingStep
from vllm_specplug.vllm_v2.speculator import TreeSpeculator
from vllm_specplug.vllm_v2.step_input import HostBatch
from vllm_specplug.vllm_worker.cost.late_budget import LateBudget
from vllm_specplug.vllm_worker.ranks import first_rank_tensor, first_rank_values


class DeviceSpeculator(TreeSpeculator):
    """Drafts one tree per request of a batch whose state the host has to copy."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self.vllm_config = vllm_config
        # Bounds on the tokens of running requests. Each step raises the upper one by the most
        # tokens that it can emit.
        self.len_upper_bound: dict[str, int] = {}
        self.len_lower_bound: dict[str, int] = {}
        # By running request: the copy of its device-built tree, and its row in that copy.
        self.copies: dict[str, tuple[TreesCopy, int]] = {}
        self.draft_graphs: DraftGraphs | None = None
        self.context_graphs: ContextGraphs | None = None
        # Steps and drafts that the host has not looked at yet, in their order.
        self._late: deque[PendingStep | PendingDraft] = deque()
        # Made with the first trees, when the drafter is loaded.
        self._ngrams: DeviceNgrams | None = None
        # The last plan, and the number of further steps for which it holds.
        self._held: PendingDraft | None = None
        self._held_steps = 0
        # The rows that the last output asked the scheduler for. A decision between two drafts
        # goes out with the next output.
        self._asked: ReservedRows | None = None
        if self._may_look_up():
            keep_history_on_device(req_states)

    def start(self, runner: Any) -> None:
        super().start(runner)
        self._late_budget = LateBudget(self.planner)

    def _may_look_up(self) -> bool:
        """Whether branches may be looked up on the device, before the drafter is loaded."""
        takes_branches = self.spec.tree_width > 1 or self.spec.head_path is None
        return bool(self.spec.ngram_topk) and takes_branches

    def warm_up(self) -> None:
        """Compiles the kernels of tables and lookups. Call once the drafter is loaded."""
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
        # Nothing that was kept for an earlier request of this name holds.
        self.len_upper_bound[req_id] = self.len_upper_bound.get(req_id, 0) + self.max_model_len
        self.len_lower_bound[req_id] = len(token_ids)

    def forget(self, gone: Sequence[str], ended: Sequence[str]) -> None:
        # When the engine goes idle, no later step counts the last ones.
        self._drain_completed()
        super().forget(gone, ended)
        self._late_budget.forget(gone)
        for req_id in gone:
            self.len_upper_bound.pop(req_id, None)
            self.len_lower_bound.pop(req_id, None)
            self.copies.pop(req_id, None)

    def tree_of(self, req_id: str) -> DraftTree | None:
        # A scheduler that waits for trees asks for it, or a grammar.
        if req_id in self.copies:
            copy, row = self.copies[req_id]
            return copy.read(row)
        return super().tree_of(req_id)

    def tree_nodes(self, req_ids: Sequence[str]) -> Callable[[], dict[str, int]]:
        if not self.proposer.drafter.drafts_on_device:
            return super().tree_nodes(req_ids)
        copies = {r: self.copies[r] for r in req_ids if r in self.copies}
        return lambda: {r: copy.num_nodes(row) for r, (copy, row) in copies.items()}

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        # vLLM calls this again after it has dropped the graphs of its memory profile.
        self.draft_graphs = self.context_graphs = None
        drafter = self.proposer.drafter
        if (
            not wants_full_graphs(self.vllm_config)
            or cudagraph_mode.decode_mode() != CUDAGraphMode.FULL
        ):
            return
        if drafter.observes_from_graphs:
            self.context_graphs = ContextGraphs(self.vllm_config, self.device, drafter)
        if drafter.drafts_from_graphs:
            # A drafter without a forward depth always drafts to the maximum depth.
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
    def ngrams(self) -> DeviceNgrams | None:
        """The branches that are looked up on the device; None for none."""
        drafter = self.proposer.drafter
        if not drafter.drafts_on_device or (branches := drafter.device_branches) is None:
            return None
        if self._ngrams is None:
            # A chain takes only the first branch, which is the best.
            count = branches.count if self.proposer.options.tree_width > 1 else 1
            self._ngrams = DeviceNgrams(branches, count, self.max_model_len, self.device)
        return self._ngrams

    def _table_rows(self, input_batch: Any, count: int) -> torch.Tensor | None:
        """Returns the request of each of the forward's `count` rows, for drafters that need it."""
        if not self.proposer.drafter.attends_context:
            return None
        ends = input_batch.query_start_loc[1 : len(input_batch.req_ids) + 1]
        rows = torch.arange(count, dtype=ends.dtype, device=ends.device)
        # Padding belongs to no request. Its rows have no slot.
        found = torch.searchsorted(ends, rows, right=True).clamp_max(len(ends) - 1)
        return found.to(torch.int32)

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
        # A row with logits emits at most one token.
        counts = np.diff(input_batch.cu_num_logits_np[: len(input_batch.req_ids) + 1])
        for req_id, count in zip(input_batch.req_ids, counts.tolist(), strict=True):
            self.len_upper_bound[req_id] += count
        # Every row of the forward. Rows that committed nothing have slot -1, which kernels that
        # write caches skip. Only the device knows which rows these are.
        committed = CommittedTokens(
            aux_hidden_states=aux_hidden_states or [],
            rows=final.computed_rows,
            positions=final.positions,
            slots=final.slots,
            last_rows=final.last_rows,
            next_token_ids=self._next_tokens(input_batch, final),
            table_rows=self._table_rows(input_batch, len(final.slots)),
        )
        if self.context_graphs is None or not self.context_graphs(committed):
            committed = replace(committed, output_states=last_hidden_states)
            self.proposer.drafter.observe(committed)
        if self.proposer.drafter.drafts_on_device:
            # The next step was scheduled before the decisions made from here on.
            self._drain_completed()
            trees = {r: self.copies[r] for r in input_batch.req_ids if r in self.copies}
            record = self.step.record(self.planner.running)
            self._late.append(PendingStep(input_batch, copy, trees, record))
            drafted = self._draft_on_device(input_batch, num_sampled, most, self._asked)
            self._asked = self.reserved = self._shared(self.reserved)
            return drafted
        read = copy.read()
        self.learn(input_batch, read.walk, read.seq_lens, self.trees)
        return self._draft(input_batch, self._batch(input_batch, read), most)

    def _drain_completed(self) -> None:
        """Learns from the steps, and decides on the trees, whose copies have arrived."""
        while self._late and self._late[0].has_arrived:
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
        # Branch scores are averages, for which the timed steps suffice.
        if self._ngrams is None or late.record.walked is None:
            return
        latest = read.latest
        for i, req_id in enumerate(late.input_batch.req_ids):
            if sampled[i] and req_id in late.trees:
                copy, row = late.trees[req_id]
                self._ngrams.learn(copy.branches(row), latest[i, -sampled[i] :])

    def _decide(self, late: PendingDraft) -> None:
        """Reserves rows of the next step to be scheduled, by what the trees were worth."""
        wanted = self._wanted(late, [late.room[row] for row in late.rows])
        if late.plan.is_trial:
            self._held_steps = 0
        self._ask_for({**dict.fromkeys(late.decoding, 0), **wanted})

    def _wanted(self, late: PendingDraft, room: list[int] | None) -> dict[str, int]:
        """Waits for the trees and returns the nodes that are worth their cost, by running request;
        `room` as for `LateBudget.wanted`."""
        trees, found = (
            [some[row] for row in late.rows] for some in (late.copy.merged, late.copy.lookup_only)
        )
        return self._late_budget.wanted(late.plan, trees, found, room)

    def _cut(self, late: PendingDraft) -> torch.Tensor:
        """Waits for the trees and cuts them for a scheduler that waits as well. Returns int32 [R],
        the nodes of each that are kept."""
        wanted = self._wanted(late, None)
        # Ranks decide by their own clocks.
        nodes = first_rank_values([float(wanted.get(req_id, 0)) for req_id in late.req_ids])
        kept = np.array(nodes, np.int32)
        late.copy.room = kept.tolist()
        return to_device(kept, self.device)

    def _ask_for(self, nodes: dict[str, int]) -> None:
        running = {r: count for r, count in nodes.items() if r in self.len_lower_bound}
        if running:
            self.reserved = ReservedRows.of(self._with_others(running))

    def _draft_on_device(
        self, input_batch: Any, num_sampled: torch.Tensor, most: int, reserved: ReservedRows | None
    ) -> torch.Tensor:
        """Drafts on the device, keeps the trees and returns their token ids int64 [R, N].

        Args:
            reserved: the rows that the scheduler was asked for in the next step.
        """
        start = self.planner.clock.mark()
        states, slots = self.req_states, input_batch.idx_mapping.long()
        budgets = self._budgets(input_batch, most)
        room = self._rows_of(input_batch, budgets, reserved)
        longest = np.minimum(states.max_seq_len[input_batch.idx_mapping_np], self.max_model_len)
        late = self._plan(input_batch, budgets, longest, room)
        forward = budgets if late is None else late.forward_depths(len(budgets))
        if late is not None and self.proposer.drafter.first_rank is not None:
            # Ranks run a draft forward together. The host waits for the first rank's depths.
            forward = np.array(first_rank_values(forward.tolist()), np.int32)
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
        # Ranks may differ in their decisions, but not in whether they draft at all.
        fits = limits[2]
        if budgets.any():
            trees, fits = _first_rank(trees, fits)
        copy = TreesCopy(trees, fits, lookup_only, found)
        for row, req_id in enumerate(input_batch.req_ids):
            self.copies[req_id] = copy, row
        if late is None:
            self.planner.measure_draft(start, (0, 0.0))
            self.stats.tree_budget = int(budgets.max(initial=0))
            if self.schedules_ahead:
                self.reserved = self._fixed_rows(self._decoding_nodes(input_batch, budgets))
        else:
            asked = forward[forward > 0]
            depth = float(asked.mean()) if len(asked) else 0.0
            self.planner.measure_draft(start, (len(asked), depth))
            late = replace(late, _copy=copy)
            if not self.schedules_ahead:
                fits = self._cut(late) if late.rows else fits
            elif not late.rows:
                self._ask_for(dict.fromkeys(late.decoding, 0))
            elif not late.is_held:
                self._late.append(late)
        return self.store.put(
            slots, inputs.roots, trees.token_ids, trees.parents, trees.counts, trees.scores, fits
        )

    def _decoding_nodes(self, input_batch: Any, budgets: np.ndarray) -> dict[str, int]:
        """Returns the budget of each decoding request. Requests in their prompt have none yet."""
        decoding = self._is_decoding(input_batch).tolist()
        rows = zip(input_batch.req_ids, budgets.tolist(), decoding, strict=True)
        return {req_id: nodes for req_id, nodes, decodes in rows if decodes}

    def _is_decoding(self, input_batch: Any) -> np.ndarray:
        """Returns bool [R]: whether each request's prompt is complete after this step."""
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
        """Returns the drafter's own trees; None for none."""
        if forward_depths is None or not self.proposer.drafter.forward_depth:
            return self._drafted(requests, None)
        chosen = np.flatnonzero(forward_depths)
        if not len(chosen):
            return None
        requests = replace(requests, depths=depths, max_depth=int(forward_depths.max()))
        return self._drafted(requests, None if len(chosen) == len(requests) else chosen)

    def _drafted(
        self,
        requests: DeviceRequests,
        # int64 rows of the batch to draft for; None for all
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
        trees = drafter.propose_on_device(requests.select(rows, chosen.tolist()))
        return None if trees is None else trees.scatter(rows, len(requests))

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
            # Contexts exclude the anchor. `bounds` does so already: the forward emits the anchor.
            min_context_lens=[self.len_lower_bound[req_id] - 1 for req_id in req_ids],
            max_context_lens=bounds.tolist(),
            penalties=draft_penalties(
                [self.penalties.get(req_id) for req_id in req_ids],
                self.req_states,
                slots,
                1 + int(bounds.max()),
            ),
        )

    def _rows_of(
        self, input_batch: Any, budgets: np.ndarray, reserved: ReservedRows | None
    ) -> np.ndarray:
        """Returns int32 [R]: for how many nodes of each request the next step has rows."""
        if reserved is None:
            return budgets
        nodes = [reserved.nodes(req_id) for req_id in input_batch.req_ids]
        return np.minimum(budgets, np.array(nodes, np.int32))

    def _plan(
        self, input_batch: Any, budgets: np.ndarray, longest: np.ndarray, room: np.ndarray
    ) -> PendingDraft | None:
        """Returns what an adaptive budget decides before drafting; None under a fixed one."""
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
        ends = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        prompts = self.req_states.prefill_len.np[input_batch.idx_mapping_np]
        is_decoding = ends >= prompts
        # Decoding requests take the lower bound: the tokens of the steps that the host has read.
        # The upper bound counts every draft of two steps as accepted, so drafting would end too
        # early.
        least = [self.len_lower_bound[req_id] for req_id in req_ids]
        tokens = np.where(is_decoding, least, ends)
        batch = Batch(int(is_decoding.sum()), int(tokens[is_decoding].sum()))
        for end, prompt in zip(ends[~is_decoding], prompts[~is_decoding], strict=True):
            batch.add_prompt(int(end), int(prompt - end), self.max_num_tokens)
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
        may_hold = self.schedules_ahead and bool(is_decoding.all())
        if plan is not None and may_hold and plan.depths.any() and not plan.is_trial:
            self._held, self._held_steps = late, HELD_STEPS
        return late

    def _budgets(self, input_batch: Any, most: int) -> np.ndarray:
        """Returns int32 [R]: most nodes of each request's next tree, as far as the host knows."""
        is_decoding = self._is_decoding(input_batch)
        running = int(is_decoding.sum())
        budgets = np.zeros(len(is_decoding), np.int32)
        for i, req_id in enumerate(input_batch.req_ids):
            if not is_decoding[i]:
                continue
            nodes, reason = self._max_nodes(req_id, running, most)
            if nodes < 1:
                self.stats.observe_plain(reason)
            budgets[i] = max(nodes, 0)
        return budgets

    def _batch(self, input_batch: Any, read: HostStep) -> HostBatch:
        """Returns the batch's requests after a step. Waits for a copy of their tokens."""
        slots, longest = input_batch.idx_mapping.long(), int(read.totals.max())
        tokens = self.req_states.all_token_ids.gpu[slots, :longest].cpu().numpy()
        ends = self.req_states.max_seq_len[input_batch.idx_mapping_np]
        return HostBatch(
            input_batch.req_ids, tokens, read.totals, ends, read.computed, read.sampled
        )


def _first_rank(trees: DeviceTrees, room: torch.Tensor) -> tuple[DeviceTrees, torch.Tensor]:
    """Returns the first tensor parallel rank's trees and rows, on every rank."""
    if get_tensor_model_parallel_world_size() == 1:
        return trees, room
    first = first_rank_tensor(torch.cat([packed_trees(trees), room[:, None]], dim=1))
    token_ids, parents, depths, scores = first[:, 1:-1].chunk(4, dim=1)
    trees = DeviceTrees(
        token_ids.long(), parents, depths, scores.contiguous().view(torch.float32), first[:, 0]
    )
    return trees, first[:, -1]


def make_device_speculator(stock: Any) -> Any:
    """`init_speculator` of a runner that verifies trees on a device. Seam: device_speculator."""
    return DeviceSpeculator
