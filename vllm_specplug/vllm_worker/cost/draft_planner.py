# SPDX-License-Identifier: Apache-2.0
"""Which requests draft in a step, how much, and what is verified: the budget applied to a batch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import envs
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from vllm_specplug.budget import AdaptiveBudget, NextStep, RowBudget
from vllm_specplug.metrics import SpecPlugMetrics
from vllm_specplug.options import RequestBudget, max_scheduled_rows, parse_request_budget
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker.cost.step_clock import HostClock, StepClock

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter
    from vllm_specplug.drafting.requests import DraftRequests
    from vllm_specplug.metrics import StepStats
    from vllm_specplug.vllm_worker.step import TreeStep

# Below "vllm", so that vLLM's handler, format and level apply.
_logger = logging.getLogger("vllm.specplug")

logger = init_logger("vllm.specplug.planner")

# An engine's first steps touch memory for the first time; their times mean nothing.
_WARM_UP_STEPS = 3


@dataclass
class Batch:
    """The rows that the next step has, whatever is drafted."""

    num_roots: int = 0
    """Requests that yield a token in it."""
    root_context: int = 0
    """Tokens these rows attend."""
    other_rows: int = 0
    """Prompt rows that yield none."""
    other_context: int = 0
    req_ids: Sequence[str] = ()
    """All requests of the batch, where each of them yields a token; else empty."""


@dataclass
class _Step:
    """One step's times in milliseconds, as far as they are known, and what took them."""

    began: Any
    """A mark of the clock."""
    verify_ms: float | None = None
    draft_ms: float = 0.0
    """Of the draft forward and what followed from it; lookups belong to the rest."""
    whole_ms: float | None = None
    req_ids: set[str] = field(default_factory=set)
    # Rows, the tokens that roots attended, and those that nodes did; None where there were others.
    shape: tuple[int, int, int] | None = None
    has_trees: bool = False
    is_warm: bool = False
    """Whether its times mean something."""
    goes_on: bool = False
    """Whether the next step has requests of this one; else the engine may have been idle."""
    is_learnt: bool = False
    """Whether its rest has been used."""


class DraftPlanner:
    """Applies the tree budget, fixed or adaptive, to one batch after the other.

    Args:
        options: our speculative config.
        row_budget: the rows of one step, and the nodes of a fixed budget.
        stats: where decisions are counted.
        vocab_size: of the target; a tree with any other token is dropped.
        clock: of what computes the steps.

    It decides by its own clock. Ranks of a tensor parallel group may decide
    differently: what they must have in common comes from the first one (`ranks`).
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
        self.clock = HostClock() if clock is None else clock
        self.max_nodes: int = options.num_speculative_tokens
        self.is_adaptive = options.tree_budget == "auto"
        self.row_budget = row_budget
        self.adaptive: AdaptiveBudget | None = None
        self._vocab_size = vocab_size
        # Requests of this step of which a tree was dropped, and whether a warning was logged.
        self._dropped: set[int] = set()
        self._has_warned = False
        self._by_request: dict[str, RequestBudget] = {}
        self.wanted: list[int] = []
        """Nodes that were worth their cost when `draft` last decided under an adaptive budget, by
        request; of requests that fixed their budget, all of it."""
        self._steps = self._begun = 0
        # Whether the last step that could draft ran a draft forward.
        self._has_forward = False
        self._now: _Step | None = None
        self._before: _Step | None = None
        # The batch for which nothing was drafted, why not, and the steps since for which `rests`
        # was true.
        self._resting: list[str] = []
        self._plain: dict[str, int] = {}
        self._plain_before: dict[str, int] = {}
        self._rested = 0

    @classmethod
    def for_engine(
        cls, vllm_config: Any, stats: StepStats, clock: StepClock | None = None
    ) -> DraftPlanner:
        """The planner of an engine's runner."""
        options = vllm_config.speculative_config
        # Beyond the scheduler's own limit the last requests of a batch would starve.
        max_rows = max_scheduled_rows(vllm_config.scheduler_config)
        nodes = options.num_speculative_tokens
        return cls(
            options,
            RowBudget(
                max_nodes=nodes if options.tree_budget == "auto" else int(options.tree_budget),
                max_step_rows=min(options.max_step_rows or max_rows, max_rows),
                scheduler_rows=max_rows,
                max_requests=vllm_config.scheduler_config.max_num_seqs,
            ),
            stats=stats,
            vocab_size=vllm_config.model_config.get_vocab_size(),
            clock=clock,
        )

    # -- limits of one request -------------------------------------------------------------

    def nodes_for(
        self, req_id: str, extra_args: dict[str, Any] | None, context_len: int, num_requests: int
    ) -> tuple[int, str]:
        """Most nodes of a request's tree when `num_requests` may draft; when that is 0, why."""
        asked = self._by_request.get(req_id)
        if asked is None:
            asked = self._by_request[req_id] = self._requested(extra_args)
        if asked.max_context is not None and context_len > asked.max_context:
            return 0, "context"
        if asked.nodes is not None:
            nodes = min(asked.nodes, self.row_budget.share(num_requests))
            return nodes, "batch" if asked.nodes else "opted_out"
        if self.adaptive is not None:
            return self.max_nodes, "budget"
        return self.row_budget.nodes_per_request(num_requests), "batch"

    def _requested(self, extra_args: dict[str, Any] | None) -> RequestBudget:
        try:
            return parse_request_budget(extra_args, self.options)
        except ValueError:
            # Front ends refuse it; one that does not must not end the worker.
            logger.warning_once("Requests came in with budgets that are none: ignored")
            return parse_request_budget(None, self.options)

    def knows(self, req_id: str) -> bool:
        """Whether `nodes_for` was asked for a request that has not ended."""
        return req_id in self._by_request

    def has_own_budget(self, req_id: str) -> bool:
        """Whether a request that is known fixed its budget."""
        return self._by_request[req_id].nodes is not None

    def forget(self, req_ids: Sequence[str]) -> None:
        """Drops requests that ended."""
        for req_id in req_ids:
            self._by_request.pop(req_id, None)
        for step in (self._before, self._now):
            if step is not None:
                step.req_ids.difference_update(req_ids)
        self._end_rest()
        if self.adaptive is not None:
            self.adaptive.forget(req_ids)

    # -- drafting --------------------------------------------------------------------------

    def rests(self, req_ids: Sequence[str]) -> bool:
        """Whether nothing is drafted for the next step either, of the same batch: then `draft` is
        not called for it, and unless it verifies earlier trees, neither is `observe`.

        Between two forwards the caches hold weights and no code: what a step does beside its
        forward takes ten times as long as it does by itself.
        """
        if self._resting and self._resting == req_ids:
            assert self.adaptive is not None
            if self.adaptive.rests_on():
                self._rested += 1
                return True
        self._end_rest()
        self._plain_before = dict(self.stats.plain_steps)
        return False

    @property
    def is_resting(self) -> bool:
        """Whether `rests` was true of the last step."""
        return self._rested > 0

    def _end_rest(self) -> None:
        for reason, count in self._plain.items() if self._rested else ():
            self.stats.observe_plain(reason, count * self._rested)
        self._resting, self._plain, self._rested = [], {}, 0

    def draft(
        self,
        drafter: Drafter,
        requests: DraftRequests,
        batch: Batch,
        room: Sequence[int] | None = None,
        show_committed: Callable[[], None] = lambda: None,
    ) -> list[DraftTree]:
        """One valid tree per request, of the nodes that should be verified.

        Args:
            room: where the next step was scheduled ahead, the nodes of each request that it has
                rows for. They are filled, for they cost what they cost; `wanted` says what would
                have paid, for a step that is not scheduled yet.
            show_committed: called before a draft forward, for the drafter to have seen what it is
                to draft from.
        """
        start = self.clock.mark()
        self._dropped.clear()
        budget = self.adaptive
        forward = (0, 0.0)
        if budget is None or not len(requests):
            trees = self._draft_fixed(drafter, requests, show_committed)
            self.wanted = []
            if room is not None:
                trees = [best_nodes(tree, most) for tree, most in zip(trees, room, strict=True)]
        else:
            trees, forward, start = self._draft_adaptively(
                budget, drafter, requests, batch, room, start, show_committed
            )
        # vLLM has room for the budgets, in masks and statistics, and for no node more.
        trees = [t.prefix(most) for t, most in zip(trees, requests.budgets, strict=True)]
        dropped = sum(1 for r in self._dropped if not trees[r].num_nodes)
        self.stats.observe_plain("invalid_tree", dropped)
        if len(requests):
            drafted = partial(self._learn_draft, self._now, forward)
            self.clock.measure(start, self.clock.mark(), drafted)
            largest = max(tree.num_nodes for tree in trees)
            self.stats.tree_budget = max(requests.budgets) if budget is None else largest
            has_lookup = drafter.has_lookup and not (budget and budget.lookups.is_skipping)
            if batch.req_ids and budget is not None and budget.is_resting and not has_lookup:
                self._resting = list(batch.req_ids)
                self._plain = {
                    reason: count - self._plain_before.get(reason, 0)
                    for reason, count in self.stats.plain_steps.items()
                }
        return trees

    def drafted_on_device(self, start: Any, forward: tuple[int, float]) -> None:
        """Call instead of `draft` where a drafter drafted by itself since the mark `start`, with a
        forward of `forward` (requests, mean depth); trees that break a rule were dropped on
        the device."""
        drafted = partial(self._learn_draft, self._now, forward)
        self.clock.measure(start, self.clock.mark(), drafted)

    def _draft_fixed(
        self, drafter: Drafter, requests: DraftRequests, show_committed: Callable[[], None]
    ) -> list[DraftTree]:
        """The trees of fixed budgets; there may be no requests."""
        if self.options.tree_budget == 0:
            # Only who asks is drafted for, and pays for its context then.
            drafter.set_deferred(True)
            if not len(requests):
                return []
        show_committed()
        if not len(requests):
            return []
        has_context = [debt < math.inf for debt in drafter.pending_context_ms(requests.req_ids)]
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
        show_committed: Callable[[], None],
    ) -> tuple[list[DraftTree], tuple[int, float], Any]:
        """The trees, the requests and the mean depth of the draft forward that they needed, and the
        mark since which it ran; `start` where there was none."""
        deepest = drafter.forward_depth
        fixed = [self.has_own_budget(req_id) for req_id in requests.req_ids]
        began = time.perf_counter()
        # What drafts without a forward is as cheap, and as uncertain, as a lookup.
        may_rest = (drafter.has_lookup or not deepest) and not any(fixed)
        rests = may_rest and budget.lookups.should_skip(len(requests))
        found = [DraftTree.empty()] * len(requests)
        if not rests:
            found = self._valid(drafter.lookup(requests))
        debts = drafter.pending_context_ms(requests.req_ids)
        depths = budget.plan(
            NextStep(
                req_ids=requests.req_ids,
                context_lens=requests.context_lens,
                caps=requests.budgets,
                fixed=fixed,
                forward_limits=[
                    min(depth, deepest) if debt < math.inf else 0
                    for depth, debt in zip(requests.depths, debts, strict=True)
                ],
                num_roots=batch.num_roots,
                root_context=batch.root_context,
                other_rows=batch.other_rows,
                other_context=batch.other_context,
                pending_ms=[0.0 if debt == math.inf else debt for debt in debts],
            ),
            found,
        )
        drafter.set_deferred(not budget.expects_drafts)
        drafted = found
        count = sum(1 for depth in depths if depth)
        if count:
            requests.forward_depths[:] = depths
            if budget.thresholds is not None:
                thresholds = budget.thresholds
                # Rows that are reserved cost what they cost: they are filled.
                min_node_prob = thresholds.node if room is None else 0.0
                requests = replace(
                    requests, min_node_prob=min_node_prob, min_level_prob=thresholds.level
                )
            show_committed()
            owes = any(debt and depth for debt, depth in zip(debts, depths, strict=True))
            if owes or not self._has_forward:
                # Work of the steps without drafts; as a part of this one's time it would make
                # drafting look dear where it is rare.
                drafter.flush_context()
                drafter.materialize_context(requests)
                start = self.clock.mark()
        elif not deepest:
            show_committed()
        self._has_forward = count > 0
        if count or not (deepest or rests):
            drafted = self._valid(drafter.propose(requests))
        depth = sum(depths) / max(count, 1)
        if count and drafter.levels_run is not None:
            depth = float(drafter.levels_run)
        trees = budget.trim(drafted)
        if may_rest and not (rests or count) and budget.saved_ms is not None:
            budget.lookups.observe(budget.saved_ms, (time.perf_counter() - began) * 1e3)
        self.wanted = [
            most if is_fixed else min(tree.num_nodes, most)
            for tree, most, is_fixed in zip(trees, requests.budgets, fixed, strict=True)
        ]
        if room is not None:
            trees = [best_nodes(tree, most) for tree, most in zip(drafted, room, strict=True)]
        for r, (had, tree) in enumerate(zip(drafted, trees, strict=True)):
            if not tree.num_nodes and r not in self._dropped:
                reason = "budget" if had.num_nodes or deepest or rests else "no_draft"
                self.stats.observe_plain("no_context" if debts[r] == math.inf else reason)
        return trees, (count, depth), start

    def _valid(self, trees: list[DraftTree]) -> list[DraftTree]:
        """The trees, empty ones in place of those that break a rule of trees.

        All trees pass here before anything relies on their rules: cutting them to the budget, the
        attention mask, the walk. One that breaks them would stop the engine or, worse, be verified
        at wrong positions.
        """
        checked = list(trees)
        for r, tree in enumerate(trees):
            if tree.is_valid(self._vocab_size):
                continue
            checked[r] = DraftTree.empty()
            self._dropped.add(r)
            if not self._has_warned:
                self._has_warned = True
                try:
                    tree.validate(self._vocab_size)
                except ValueError as error:
                    _logger.warning(
                        "A draft was dropped and its request decoded plainly for a step: %s. This "
                        "costs speed, never tokens; please report it with the draft head's name. "
                        "Further ones are counted only, as plain steps of reason invalid_tree.",
                        error,
                    )
        return checked

    # -- what a step taught ----------------------------------------------------------------

    def begin_step(self) -> None:
        """Call when a step starts."""
        began = self.clock.begin_step()
        if self._now is not None:
            self.clock.measure(self._now.began, began, partial(self._learn_whole, self._now))
        self._begun += 1
        # A draft on a device may be over before the host looks at its step.
        self._before, self._now = self._now, _Step(began, is_warm=self._begun > _WARM_UP_STEPS)
        self.clock.poll()

    @property
    def running(self) -> tuple[_Step | None, _Step | None]:
        """The step that runs and the one before it, for an `observe` that comes later."""
        return self._now, self._before

    def observe(
        self,
        step: TreeStep,
        req_ids: Sequence[str],
        walked: Any,
        running: tuple[_Step | None, _Step | None] | None = None,
    ) -> None:
        """Call once a step's trees are walked.

        Args:
            walked: a mark of the clock; None for a step that was not timed. Nothing is learnt of
                how probable its nodes were either: as many requests take the host a millisecond.
            running: as it was in that step, where it is over.
        """
        now, before = self.running if running is None else running
        assert now is not None
        now.req_ids = set(req_ids)
        now.has_trees = any(r.tree is not None and r.tree.num_nodes for r in step.requests)
        self._steps += 1
        now.is_warm = self._steps > _WARM_UP_STEPS
        if all(r.first_row == r.root_row for r in step.requests):
            rows = [(r.end_row - r.first_row, r.context_len + 1) for r in step.requests]
            now.shape = (
                sum(count for count, _ in rows),
                sum(length for _, length in rows),
                sum((count - 1) * length for count, length in rows),
            )
        if before is not None:
            before.goes_on = now.is_warm and not before.req_ids.isdisjoint(req_ids)
            self._learn_rest(before)
        self.clock.measure(now.began, walked, partial(self._learn_verify, now))
        budget = self.adaptive
        if budget is None:
            return
        verified = [
            (req_id, r.tree, r.accepted_path)
            for req_id, r in zip(req_ids, step.requests, strict=True)
            # Of a step that is over a request may have ended, and is not to come back.
            if r.tree is not None and r.tree.num_nodes and (running is None or self.knows(req_id))
        ]
        if verified:
            ids, trees, paths = zip(*verified, strict=True)
            if walked is None:
                budget.note_accepted(ids, paths)
                return
            expected = budget.observe(ids, trees, paths)
            self.stats.observe_prediction(expected, sum(len(path) for path in paths))

    # Times arrive in the order of the clock: a step's verification, its drafting, the whole step.
    # Only of a step that the host looks at late comes the verification last.

    def _learn_verify(self, step: _Step, milliseconds: float) -> None:
        step.verify_ms = milliseconds
        if step.has_trees:
            self.stats.observe_ms("verify", milliseconds)
        if self.adaptive is not None and step.is_warm and step.shape is not None:
            rows, context, more_context = step.shape
            self.adaptive.costs.observe_verify(
                rows, rows, context, milliseconds, more_context, has_trees=step.has_trees
            )
        self._learn_rest(step)

    def _learn_draft(
        self,
        step: _Step | None,
        # requests and mean depth
        forward: tuple[int, float],
        milliseconds: float,
    ) -> None:
        self.stats.observe_ms("draft", milliseconds)
        if step is None or not forward[0]:
            return
        step.draft_ms = milliseconds
        if self.adaptive is not None and step.is_warm:
            self.adaptive.costs.observe_draft(*forward, milliseconds)

    def _learn_whole(self, step: _Step, milliseconds: float) -> None:
        step.whole_ms = milliseconds
        self._learn_rest(step)

    def _learn_rest(self, step: _Step) -> None:
        """Once it is known how long the step and its verification took and whether another one
        followed at once."""
        whole, verify = step.whole_ms, step.verify_ms
        if self.adaptive is None or whole is None or verify is None:
            return
        if step.goes_on and not step.is_learnt:
            step.is_learnt = True
            rest = whole - verify - step.draft_ms
            self.adaptive.costs.observe_rest(rest, has_trees=step.has_trees)


def best_nodes(tree: DraftTree, most: int) -> DraftTree:
    """The `most` nodes of highest score, in their old order: no node scores more than its parent,
    and of equals the first are taken."""
    if tree.num_nodes <= most:
        return tree
    return tree.subset(np.sort(np.argsort(-tree.scores, kind="stable")[:most]).tolist())


def step_metrics(options: Any) -> SpecPlugMetrics:
    """The metrics of a runner with this speculative config; the first rank reports."""
    return SpecPlugMetrics(
        head=options.head_path or str(options.plugin_method),
        log_interval_s=envs.VLLM_LOG_STATS_INTERVAL,
        is_reporting=get_tensor_model_parallel_rank() == 0,
    )
