# SPDX-License-Identifier: Apache-2.0
"""Applies the tree budget to a batch: which requests draft, how much, and what is verified."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import envs
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from vllm_specplug.budget.adaptive_budget import (
    AdaptiveBudget,
    Batch,
    LevelThresholds,
    NextStep,
    Plan,
)
from vllm_specplug.metrics.worker_metrics import SpecPlugMetrics
from vllm_specplug.options import RowBudget, parse_request_budget
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_attention.tree_rows import RequestRows
from vllm_specplug.vllm_worker.cost.step_clock import StepClock
from vllm_specplug.vllm_worker.ranks import first_rank_values

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter
    from vllm_specplug.drafting.requests import DraftRequests
    from vllm_specplug.metrics.step_stats import StepStats

# Below "vllm", so that vLLM's handler, format and level apply.
_logger = logging.getLogger("vllm.specplug")

logger = init_logger("vllm.specplug.planner")

# An engine's first steps touch memory for the first time, so their times do not count.
_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class StepRequest(RequestRows):
    """One request of a verified step on the host, with its tree, which may be empty."""

    tree: DraftTree
    accepted_path: list[int] = field(default_factory=list)


@dataclass
class _Step:
    """Times of one step in milliseconds, as far as they are known, and what it computed."""

    began: Any
    """A mark of the clock."""
    verify_ms: float | None = None
    draft_ms: float = 0.0
    """The draft forward and the work that follows from it, without lookups."""
    total_ms: float | None = None
    req_ids: set[str] = field(default_factory=set)
    # Rows, tokens that the roots attended, tokens that the nodes attended; None with prompt rows.
    shape: tuple[int, int, int] | None = None
    has_trees: bool = False
    is_warm: bool = False
    """Whether its times count."""
    has_successor: bool = False
    """Whether the next step shares requests with it. If not, the engine may have been idle."""
    has_rest: bool = False
    """Whether its time outside verification and draft was observed."""


class DraftPlanner:
    """Applies the tree budget, fixed or adaptive, to one batch after the other.

    It decides by its own clock, so tensor parallel ranks may decide differently. `ranks` broadcasts
    from the first rank what all must have in common.

    Args:
        options: the plugin's speculative config.
        row_budget: the rows of one step, and the nodes of a fixed budget.
        stats: counts the decisions.
        vocab_size: the target's; a tree with any other token is dropped.
        clock: the clock of the device that computes the steps.
    """

    def __init__(
        self,
        options: Any,
        row_budget: RowBudget,
        stats: StepStats,
        vocab_size: int,
        clock: StepClock | None = None,
    ) -> None:
        self.options = options
        self.stats = stats
        self.clock = StepClock() if clock is None else clock
        self.max_nodes: int = options.num_speculative_tokens
        self.is_adaptive = options.tree_budget == "auto"
        self.row_budget = row_budget
        self.adaptive: AdaptiveBudget | None = None
        self._vocab_size = vocab_size
        # Requests of this step whose tree was dropped, and whether a warning was logged.
        self._dropped: set[int] = set()
        self._has_warned = False
        # Nodes that each request asked for; None for those that follow the engine's budget.
        self._by_request: dict[str, int | None] = {}
        self.wanted: list[int] = []
        """Nodes of each request that were worth their cost in the last `draft` under an adaptive
        budget; the whole budget of requests that fixed it."""
        self._steps = self._begun = 0
        # Whether the last step that could draft ran a draft forward.
        self._has_forward = False
        self._now: _Step | None = None
        self._before: _Step | None = None

    # -- limits of one request -------------------------------------------------------------

    def nodes_for(
        self, req_id: str, extra_args: dict[str, Any] | None, num_requests: int
    ) -> tuple[int, str]:
        """Returns the maximum nodes of a request's tree if `num_requests` may draft, and the reason
        if that is 0."""
        if req_id not in self._by_request:
            self._by_request[req_id] = self._requested(extra_args)
        asked = self._by_request[req_id]
        if asked is not None:
            nodes = min(asked, self.row_budget.share(num_requests))
            return nodes, "batch" if asked else "opted_out"
        if self.adaptive is not None:
            return self.max_nodes, "budget"
        return self.row_budget.nodes_per_request(num_requests), "batch"

    def _requested(self, extra_args: dict[str, Any] | None) -> int | None:
        try:
            return parse_request_budget(extra_args, self.options)
        except ValueError:
            # The front end refuses it. A front end that does not must not end the worker.
            logger.warning_once("Ignored an invalid budget of a request")
            return None

    def knows(self, req_id: str) -> bool:
        """Returns whether `nodes_for` was called for a request that has not ended."""
        return req_id in self._by_request

    def has_own_budget(self, req_id: str) -> bool:
        """Returns whether a known request fixed its budget."""
        return self._by_request[req_id] is not None

    def forget(self, req_ids: Sequence[str]) -> None:
        """Drops requests that ended."""
        for req_id in req_ids:
            self._by_request.pop(req_id, None)
        for step in (self._before, self._now):
            if step is not None:
                step.req_ids.difference_update(req_ids)
        if self.adaptive is not None:
            self.adaptive.forget(req_ids)

    # -- drafting --------------------------------------------------------------------------

    def draft(
        self,
        drafter: Drafter,
        requests: DraftRequests,
        batch: Batch,
        room: Sequence[int] | None = None,
    ) -> list[DraftTree]:
        """Returns one valid tree per request, of the nodes to verify.

        Args:
            room: nodes of each request for which the next step has rows, if it was scheduled ahead.
                These rows are filled, because they cost the same without a node. `wanted` holds the
                nodes that were worth their cost, for the step that is scheduled next.
        """
        start = self.clock.mark()
        self._dropped.clear()
        forward = (0, 0.0)
        if self.adaptive is None or not len(requests):
            trees = self._draft_fixed(drafter, requests)
            self.wanted = []
            if room is not None:
                trees = [best_nodes(tree, most) for tree, most in zip(trees, room, strict=True)]
        else:
            trees, forward, start = self._draft_adaptively(
                self.adaptive, drafter, requests, batch, room, start
            )
        # vLLM's masks and statistics have room for the budgets and no more.
        trees = [t.prefix(most) for t, most in zip(trees, requests.budgets, strict=True)]
        dropped = sum(1 for r in self._dropped if not trees[r].num_nodes)
        self.stats.observe_plain("invalid_tree", dropped)
        if len(requests):
            self.measure_draft(start, forward)
            sizes = requests.budgets if self.adaptive is None else [t.num_nodes for t in trees]
            self.stats.tree_budget = max(sizes)
        return trees

    def measure_draft(self, start: Any, forward: tuple[int, float]) -> None:
        """Measures a draft since the mark `start`, with a forward of `forward` (number of requests,
        mean depth). Call it after a draft that the device made without `draft`."""
        use = partial(self._observe_draft_ms, self._now, forward)
        self.clock.measure(start, self.clock.mark(), use)

    def _draft_fixed(self, drafter: Drafter, requests: DraftRequests) -> list[DraftTree]:
        """Returns the trees of fixed budgets; there may be no requests."""
        if self.options.tree_budget == 0:
            # Only requests with their own budget draft, and pay for their context then.
            drafter.set_deferred(True)
        if not len(requests):
            return []
        has_context = [ms < math.inf for ms in drafter.pending_context_ms(requests.req_ids)]
        if all(has_context):
            return self._valid(drafter.propose(requests))
        requests.forward_depths[:] = [
            depth if is_known else 0
            for depth, is_known in zip(requests.depths, has_context, strict=True)
        ]
        draft = drafter.propose if any(has_context) else drafter.lookup
        trees = self._valid(draft(requests))
        lost = sum(
            not (is_known or tree.num_nodes or r in self._dropped)
            for r, (is_known, tree) in enumerate(zip(has_context, trees, strict=True))
        )
        self.stats.observe_plain("no_context", lost)
        return trees

    def _draft_adaptively(
        self,
        budget: AdaptiveBudget,
        drafter: Drafter,
        requests: DraftRequests,
        batch: Batch,
        room: Sequence[int] | None,
        start: Any,
    ) -> tuple[list[DraftTree], tuple[int, float], Any]:
        """Returns the trees, the draft forward (number of requests, mean depth) and the mark since
        which it ran; `start` without a forward."""
        can_forward = drafter.forward_depth > 0
        fixed = [self.has_own_budget(req_id) for req_id in requests.req_ids]
        began = time.perf_counter()
        # A draft without a forward is as cheap, and as uncertain, as a lookup.
        is_optional = (drafter.has_lookup or not can_forward) and not any(fixed)
        skips_lookup = is_optional and budget.lookups.should_skip(len(requests))
        looked_up = [DraftTree.empty()] * len(requests)
        if not skips_lookup:
            looked_up = self._valid(drafter.lookup(requests))
        pending_ms = drafter.pending_context_ms(requests.req_ids)
        plan = budget.plan(_next_step(drafter, requests, batch, fixed, pending_ms), looked_up)
        if drafter.first_rank is not None:
            _share_forwards(plan)
        depths = plan.depths.tolist()
        drafter.set_deferred(not budget.expects_drafts)
        has_forward = any(depths)
        if has_forward:
            requests.forward_depths[:] = depths
            if plan.thresholds is not None:
                # Reserved rows cost the same without a node: they are filled.
                min_node_prob = plan.thresholds.node if room is None else 0.0
                requests = replace(
                    requests,
                    min_node_prob=min_node_prob,
                    min_level_prob=plan.thresholds.level,
                )
            is_pending = any(ms and depth for ms, depth in zip(pending_ms, depths, strict=True))
            if is_pending or not self._has_forward:
                # Work of steps without drafts. In this draft's time, it would make rare drafts look
                # expensive.
                drafter.materialize_context(requests)
                start = self.clock.mark()
        self._has_forward = has_forward
        drafted = looked_up
        if has_forward or not (can_forward or skips_lookup):
            drafted = self._valid(drafter.propose(requests))
        trees = budget.trim(plan, drafted)
        if is_optional and not (skips_lookup or has_forward):
            budget.lookups.observe(budget.saved_ms, (time.perf_counter() - began) * 1e3)
        self.wanted = [
            most if is_fixed else min(tree.num_nodes, most)
            for tree, most, is_fixed in zip(trees, requests.budgets, fixed, strict=True)
        ]
        if room is not None:
            trees = [best_nodes(tree, most) for tree, most in zip(drafted, room, strict=True)]
        for r, (tree, kept) in enumerate(zip(drafted, trees, strict=True)):
            if not kept.num_nodes and r not in self._dropped:
                had_choice = tree.num_nodes or can_forward or skips_lookup
                reason = "budget" if had_choice else "no_draft"
                self.stats.observe_plain("no_context" if pending_ms[r] == math.inf else reason)
        return trees, _forward_size(drafter, depths), start

    def _valid(self, trees: list[DraftTree]) -> list[DraftTree]:
        """Returns the trees, with an empty tree in place of each invalid one.

        All trees pass this check before they are cut to the budget, masked or walked. An invalid
        tree would stop the engine or, worse, be verified at wrong positions.
        """
        checked = list(trees)
        for r, tree in enumerate(trees):
            fault = tree.fault(self._vocab_size)
            if fault is None:
                continue
            checked[r] = DraftTree.empty()
            self._dropped.add(r)
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "Dropped an invalid draft; its request decodes without drafts for a step: "
                    "DraftTree: %s. This costs speed, never tokens; please report it with the "
                    "draft head's name. Later ones are only counted, as plain steps of reason "
                    "invalid_tree.",
                    fault,
                )
        return checked

    # -- observing steps -------------------------------------------------------------------

    def begin_step(self) -> None:
        """Call when a step starts."""
        began = self.clock.begin_step()
        if self._now is not None:
            self.clock.measure(self._now.began, began, partial(self._observe_total_ms, self._now))
        self._begun += 1
        # A draft on a device may end before the host reads its step.
        self._before, self._now = self._now, _Step(began, is_warm=self._begun > _WARM_UP_STEPS)
        self.clock.poll()

    @property
    def running(self) -> tuple[_Step | None, _Step | None]:
        """The running step and the previous one, for a later call of `observe`."""
        return self._now, self._before

    def observe(
        self,
        requests: Sequence[StepRequest],
        req_ids: Sequence[str],
        walked: Any,
        running: tuple[_Step | None, _Step | None] | None = None,
    ) -> None:
        """Learns from a step whose trees were walked.

        Args:
            requests: all requests of the step, in batch order.
            walked: a mark of the clock; None for a step that was not timed. Such a step does not
                update node probabilities either, which would take the host a millisecond for many
                requests.
            running: `running` of that step if it is over.
        """
        now, before = self.running if running is None else running
        assert now is not None
        now.req_ids = set(req_ids)
        now.has_trees = any(r.tree.num_nodes for r in requests)
        self._steps += 1
        now.is_warm = self._steps > _WARM_UP_STEPS
        if all(r.first_row == r.root_row for r in requests):
            rows = [(r.end_row - r.first_row, r.context_len + 1) for r in requests]
            now.shape = (
                sum(count for count, _ in rows),
                sum(length for _, length in rows),
                sum((count - 1) * length for count, length in rows),
            )
        if before is not None:
            before.has_successor = now.is_warm and not before.req_ids.isdisjoint(req_ids)
            self._observe_rest(before)
        self.clock.measure(now.began, walked, partial(self._observe_verify_ms, now))
        budget = self.adaptive
        if budget is None:
            return
        verified = [
            (req_id, r.tree, r.accepted_path)
            for req_id, r in zip(req_ids, requests, strict=True)
            # Requests of a step that is over may have ended; the budget must not store them again.
            if r.tree.num_nodes and (running is None or self.knows(req_id))
        ]
        if verified:
            ids, trees, paths = zip(*verified, strict=True)
            if walked is None:
                budget.note_accepted(ids, paths)
                return
            expected = budget.observe(ids, trees, paths)
            self.stats.observe_prediction(expected, sum(len(path) for path in paths))

    # The clock calls these in the order verification, draft, total. For a step that the host reads
    # late, verification comes last.

    def _observe_verify_ms(self, step: _Step, milliseconds: float) -> None:
        step.verify_ms = milliseconds
        if step.has_trees:
            self.stats.observe_ms("verify", milliseconds)
        if self.adaptive is not None and step.is_warm and step.shape is not None:
            rows, context, node_context = step.shape
            self.adaptive.costs.observe_verify(
                rows, rows, context, milliseconds, node_context, has_trees=step.has_trees
            )
        self._observe_rest(step)

    def _observe_draft_ms(
        self,
        step: _Step | None,
        # number of requests and mean depth
        forward: tuple[int, float],
        milliseconds: float,
    ) -> None:
        self.stats.observe_ms("draft", milliseconds)
        if step is None or not forward[0]:
            return
        step.draft_ms = milliseconds
        if self.adaptive is not None and step.is_warm:
            self.adaptive.costs.observe_draft(*forward, milliseconds)

    def _observe_total_ms(self, step: _Step, milliseconds: float) -> None:
        step.total_ms = milliseconds
        self._observe_rest(step)

    def _observe_rest(self, step: _Step) -> None:
        """Observes the time outside verification and draft, once all of it is known and the next
        step has followed at once."""
        total, verify = step.total_ms, step.verify_ms
        if self.adaptive is None or total is None or verify is None:
            return
        if step.has_successor and not step.has_rest:
            step.has_rest = True
            rest = total - verify - step.draft_ms
            self.adaptive.costs.observe_rest(rest, has_trees=step.has_trees)


def _next_step(
    drafter: Drafter,
    requests: DraftRequests,
    batch: Batch,
    fixed: list[bool],
    pending_ms: list[float],
) -> NextStep:
    """Returns the batch as the budget plans it, before any draft forward."""
    deepest = drafter.forward_depth
    return NextStep(
        req_ids=requests.req_ids,
        context_lens=requests.context_lens,
        caps=requests.budgets,
        fixed=fixed,
        forward_limits=[
            min(depth, deepest) if ms < math.inf else 0
            for depth, ms in zip(requests.depths, pending_ms, strict=True)
        ],
        batch=batch,
        pending_ms=[0.0 if ms == math.inf else ms for ms in pending_ms],
    )


def _share_forwards(plan: Plan) -> None:
    """Replaces depths and thresholds by the first tensor parallel rank's, because all ranks must
    run the same draft forwards."""
    own = plan.thresholds or LevelThresholds(0.0, 0.0)
    node, level, *depths = first_rank_values([own.node, own.level, *plan.depths.tolist()])
    plan.thresholds = LevelThresholds(node, level)
    plan.depths = np.array(depths, np.int64)


def _forward_size(drafter: Drafter, depths: Sequence[int]) -> tuple[int, float]:
    """Returns the number of requests and the mean depth of the draft forward that ran last."""
    count = sum(1 for depth in depths if depth)
    if count and drafter.levels_run is not None:
        return count, float(drafter.levels_run)
    return count, sum(depths) / max(count, 1)


def best_nodes(tree: DraftTree, most: int) -> DraftTree:
    """Returns the tree of the `most` nodes with the highest scores, in their old order.

    No node scores more than its parent, and the first of equal nodes are kept.
    """
    if tree.num_nodes <= most:
        return tree
    return tree.subset(np.sort(np.argsort(-tree.scores, kind="stable")[:most]).tolist())


def step_metrics(options: Any) -> SpecPlugMetrics:
    """Returns the metrics of a runner with this speculative config; the first rank reports."""
    return SpecPlugMetrics(
        head=options.head_path or str(options.plugin_method),
        log_interval_s=envs.VLLM_LOG_STATS_INTERVAL,
        is_reporting=get_tensor_model_parallel_rank() == 0,
    )
