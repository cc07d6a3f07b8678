# SPDX-License-Identifier: Apache-2.0
"""The adaptive budget, which combines cost model, acceptance model, gate and allocation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.budget import Bools, Floats, Ints
from vllm_specplug.budget.acceptance import AcceptanceModel, accepted_nodes
from vllm_specplug.budget.allocation import allocate
from vllm_specplug.budget.draft_gate import IMPOSSIBLE_MS, DraftGate, GateDecision
from vllm_specplug.budget.fairness import FairnessWeights
from vllm_specplug.budget.lookup_gate import LookupGate
from vllm_specplug.budget.nodes import Nodes
from vllm_specplug.budget.step_cost import StepCostModel
from vllm_specplug.budget.trials import CostTrials
from vllm_specplug.options import RowBudget
from vllm_specplug.tree import DraftTree

_REST_STEPS = 8
"""Steps for which a decision against all drafts holds if the batch does not change."""
_CHILD_PROB = 0.7
"""Estimated probability of the best child of a node, before the child is drafted."""
_AVERAGED_NODES = 4
"""Nodes per request over which the cost of a row is averaged when a draft begins."""


@dataclass
class Batch:
    """The rows of the next step other than drafts."""

    num_roots: int = 0
    """Requests that yield a token in it."""
    root_context: int = 0
    """Tokens that these rows attend."""
    other_rows: int = 0
    """Prompt rows, which yield no token."""
    other_context: int = 0

    def add_prompt(self, num_computed: int, num_left: int, max_num_tokens: int) -> None:
        """Adds the prompt rows of a request, as many as fit a step of `max_num_tokens`."""
        rows = max(0, min(num_left, max_num_tokens - self.num_roots))
        self.other_rows += rows
        self.other_context += rows * (num_computed + rows // 2)


@dataclass(frozen=True)
class NextStep:
    """What is known about the step that will verify the drafts, before they are made."""

    # [R] requests that may draft
    req_ids: Sequence[str]
    # [R] tokens before each root
    context_lens: Sequence[int]
    # [R] maximum number of nodes of each tree
    caps: Sequence[int]
    # [R] maximum depth of a draft forward; 0 for no forward
    forward_limits: Sequence[int]
    # [R] whether a request set its own budget: `caps` nodes are drafted and verified at any cost
    fixed: Sequence[bool]
    batch: Batch
    # [R] ms of deferred work before the first draft forward for each; empty for none
    pending_ms: Sequence[float] = ()


@dataclass(frozen=True)
class LevelThresholds:
    """Minimum probabilities for which another level of a draft pays.

    Probabilities are the head's own, before any correction.
    """

    node: float
    """Minimum probability of a node whose children are drafted. A less probable node does not pay
    for its row, and its children are even less probable."""
    level: float
    """Minimum sum of the probabilities of a level, over all requests, for the next level to be
    drafted."""


@dataclass
class Plan:
    """The decision before drafting.

    If trees are built on a device, the host gets them only after it has planned later steps.
    """

    step: NextStep
    # [R] slots of the acceptance model; -1 for a request that has ended
    slots: Ints
    # [R] depth of the draft forward; 0 for none
    depths: Ints
    lookup_nodes: Nodes
    is_trial: bool = False
    """Whether the step only measures another size, or the nodes of a forward."""
    thresholds: LevelThresholds | None = None
    """None if all levels of the draft are drafted."""
    ratio: float = 1.0
    """Milliseconds of the step with its chosen trees relative to a plain one."""
    # [sum of caps + 1] ms of the step by number of nodes, of which some may exceed the limit on
    # rows; None until it is needed
    step_ms: Floats | None = None

    def exclude(self, request: int) -> None:
        """Excludes a request that has ended. Another request may have its slot."""
        self.depths[request] = 0
        self.slots[request] = -1


class AdaptiveBudget:
    """Decides for every step which requests draft, how deep, and which nodes are verified.

    Args:
        costs: cost model of a step.
        row_budget: limit on the rows of trees.
        max_forward_depth: maximum depth of a draft forward; 0 if the method has none.
    """

    def __init__(self, costs: StepCostModel, row_budget: RowBudget, max_forward_depth: int) -> None:
        self.costs = costs
        self.row_budget = row_budget
        self.acceptance = AcceptanceModel()
        self.gate = DraftGate(max_forward_depth) if max_forward_depth else None
        self.lookups = LookupGate()
        self.fairness = FairnessWeights()
        self.trials = CostTrials(costs.forward)
        # Number of steps for which the decision against all drafts still holds, and their requests.
        self._plain_steps = 0
        self._plain_ids: list[str] = []
        # Expected tokens per millisecond of the last step with drafts, relative to a plain one.
        self._gain = 1.0
        self.saved_ms = 0.0
        """Milliseconds of plain steps that the best choice of the last trimmed trees is expected to
        save."""

    # -- before drafting -------------------------------------------------------------------

    def plan(self, step: NextStep, lookups: Sequence[DraftTree]) -> Plan:
        """Returns the plan with the depth of the draft forward for each request, `Plan.depths`.

        Args:
            lookups: trees from lookups, whose cost is negligible.
        """
        slots = self._slots_of(step.req_ids)
        nodes = self._nodes(lookups, slots)
        plan = Plan(step, slots, np.zeros(len(step.req_ids), np.int64), nodes)
        holds = self._still_holds_plain(step, nodes)
        if self.gate is not None and len(step.req_ids) and not holds:
            self._plan_forwards(self.gate, plan)
        return plan

    def _still_holds_plain(self, step: NextStep, lookups: Nodes) -> bool:
        """Returns whether the last decision against all drafts still holds.

        A decision takes up to 0.5 ms on a busy core, more than 1 % of a small model's step.
        """
        if self._plain_steps and not len(lookups.scores) and step.req_ids == self._plain_ids:
            assert self.gate is not None
            self._plain_steps -= 1
            self.gate.skip()
            return True
        self._plain_steps = 0
        return False

    def _plan_forwards(self, gate: DraftGate, plan: Plan) -> None:
        step = plan.step
        fixed = np.asarray(step.fixed, np.bool_)
        forced = int(np.asarray(step.caps)[fixed].sum())
        step_ms = self._step_ms(plan, forced)[forced:]
        step_ms = step_ms + self._mean_node_ms(step, len(step_ms))
        decision = self._decide(gate, plan, fixed, step_ms)
        limits = np.asarray(step.forward_limits, np.int64)
        plan.depths = np.where(fixed, limits, decision.depths)
        plan.is_trial = decision.is_probe
        if not (decision.depths.any() or len(plan.lookup_nodes.scores) or forced):
            self._plain_steps, self._plain_ids = _REST_STEPS - 1, list(step.req_ids)
        # A probe measures all levels.
        if self.costs.by_level and not decision.is_probe and not fixed.any():
            plan.thresholds = self._level_thresholds(plan, step_ms)

    def _decide(self, gate: DraftGate, plan: Plan, fixed: Bools, step_ms: Floats) -> GateDecision:
        step, lookups = plan.step, plan.lookup_nodes
        free = ~fixed[lookups.owners]
        return gate.decide(
            plan.slots,
            np.where(fixed, 0, np.asarray(step.forward_limits, np.int64)),
            lookups.probabilities[free],
            lookups.owners[free],
            step.batch.num_roots,
            self.costs.draft_ms,
            step_ms,
            self.fairness.weights(plan.slots, step.batch.num_roots),
            np.asarray(step.pending_ms, np.float64) if len(step.pending_ms) else None,
        )

    def _level_thresholds(self, plan: Plan, step_ms: Floats) -> LevelThresholds | None:
        """Returns the thresholds for a draft, assuming the gain of the last one.

        Args:
            step_ms: milliseconds of the step by number of nodes.
        """
        drafted = int(np.count_nonzero(plan.depths))
        possible = int(np.count_nonzero(step_ms < IMPOSSIBLE_MS)) - 1
        nodes = min(_AVERAGED_NODES * drafted, possible)
        if nodes < 1:
            return None
        rate = self._gain * plan.step.batch.num_roots / float(step_ms[0])
        row_ms = (float(step_ms[nodes]) - float(step_ms[0])) / nodes
        first, second = self.costs.draft_ms(drafted, np.array([1, 2]))
        return LevelThresholds(rate * row_ms, rate * float(second - first) / _CHILD_PROB)

    @property
    def expects_drafts(self) -> bool:
        """Whether drafts pay at present for at least some requests."""
        return self.gate is None or self.gate.is_on

    # -- after drafting --------------------------------------------------------------------

    def trim(self, plan: Plan, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Returns the parts of the trees that pay for their rows.

        Args:
            trees: one tree per request of the plan.
        """
        nodes = self._nodes(trees, plan.slots)
        return nodes.subtrees(trees, self._paying(plan, nodes))

    def trim_late(
        self, plan: Plan, trees: Sequence[DraftTree], lookups: Sequence[DraftTree]
    ) -> list[int]:
        """Returns the number of nodes of each tree that `trim` would keep.

        Args:
            plan: an earlier plan, made before its lookups were known.
            lookups: trees from lookups, as for `plan`.
        """
        plan.lookup_nodes = self._nodes(lookups, plan.slots)
        nodes = self._nodes(trees, plan.slots)
        counts: list[int] = nodes.counts_of(self._paying(plan, nodes))
        return counts

    def repeat(self, plan: Plan) -> None:
        """Counts a step that follows an earlier plan without a new decision."""
        self.fairness.step(plan.slots, plan.step.batch.num_roots, plan.ratio)

    def _paying(self, plan: Plan, nodes: Nodes) -> Bools:
        """Returns [N] whether each node pays for its row."""
        step = plan.step
        assert len(nodes.counts) == len(step.req_ids)
        drafted = np.flatnonzero(plan.depths)
        if self.gate is not None and len(drafted):
            self.gate.observe(
                plan.slots[drafted],
                plan.depths[drafted],
                nodes.of_requests(drafted),
                plan.lookup_nodes.of_requests(drafted),
            )
        self.saved_ms = 0.0
        kept = np.zeros(len(nodes.probabilities), np.bool_)
        if len(kept) or len(drafted):
            kept = self._allocate(plan, nodes)
        self.fairness.step(plan.slots, step.batch.num_roots, plan.ratio)
        return kept

    def _allocate(self, plan: Plan, nodes: Nodes) -> Bools:
        """Returns [N] whether to verify each node, and updates the ratio of the plan."""
        step = plan.step
        weights = self.fairness.weights(plan.slots, step.batch.num_roots)
        probabilities = nodes.capped(np.asarray(step.caps)) * weights[nodes.owners]
        is_possible = probabilities > 0
        kept = np.asarray(step.fixed, np.bool_)[nodes.owners] & is_possible
        free = np.flatnonzero(~kept & is_possible)
        forced = int(kept.sum())
        step_ms = self._step_ms(plan, forced)
        plain_ms = float(step_ms[0])
        context_lens = np.asarray(step.context_lens, np.float64)
        best = allocate(
            probabilities[free],
            step_ms[forced : forced + len(free) + 1] + self._draft_ms(plan),
            step.batch.num_roots + float(probabilities[kept].sum()),
            (self.costs.attention_ms * context_lens)[nodes.owners[free]],
        )
        self._gain = max(1.0, best.rate * plain_ms / step.batch.num_roots)
        self.saved_ms = plain_ms * (self._gain - 1.0)
        chosen = best
        if not any(step.fixed):
            chosen = self.trials.choose(step.batch.num_roots + step.batch.other_rows, best)
        plan.is_trial |= chosen is not best
        plan.ratio = chosen.milliseconds / plain_ms
        kept[free] = chosen.kept
        return kept

    # -- learning from a step --------------------------------------------------------------

    def observe(
        self,
        req_ids: Sequence[str],
        trees: Sequence[DraftTree],
        paths: Sequence[Sequence[int]],
    ) -> float:
        """Learns from verified trees and their accepted paths. Returns the expected number of
        accepted nodes."""
        nodes = Nodes.of(trees)
        if not len(nodes.scores):
            return 0.0
        slots = self.note_accepted(req_ids, paths)
        expected = self.acceptance.observe(
            nodes.scores,
            nodes.depths,
            slots[nodes.owners],
            accepted_nodes(paths, nodes.counts.tolist()),
        )
        return float(expected.sum())

    def note_accepted(self, req_ids: Sequence[str], paths: Sequence[Sequence[int]]) -> Ints:
        """Counts the accepted nodes of a step without learning from it.

        Returns:
            int64 [R] slots of the requests.
        """
        slots = self._slots_of(req_ids)
        self.fairness.accepted(slots, np.array([len(path) for path in paths], np.int64))
        return slots

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops requests that ended."""
        ended = set(req_ids)
        self.acceptance.forget(ended)
        if not ended.isdisjoint(self._plain_ids):
            self._plain_steps, self._plain_ids = 0, []

    # -- costs and probabilities -----------------------------------------------------------

    def _slots_of(self, req_ids: Sequence[str]) -> Ints:
        slots = np.empty(len(req_ids), np.int64)
        for i, req_id in enumerate(req_ids):
            slots[i], is_new = self.acceptance.slot_of(req_id)
            if is_new:
                self.fairness.reset(int(slots[i]))
                if self.gate is not None:
                    self.gate.reset(int(slots[i]))
        return slots

    def _nodes(self, trees: Sequence[DraftTree], slots: Ints) -> Nodes:
        nodes = Nodes.of(trees)
        if len(nodes.scores):
            nodes.probabilities = self.acceptance.probabilities(
                nodes.scores, nodes.depths, slots[nodes.owners]
            )
        return nodes

    def _step_ms(self, plan: Plan, forced: int) -> Floats:
        """Returns [sum of caps + 1] ms of the step with 0, 1, ... nodes, without their attention.

        Args:
            forced: number of nodes that are verified at any cost.
        """
        batch = plan.step.batch
        if plan.step_ms is None:
            plan.step_ms = self.costs.decode_ms(
                batch.num_roots, batch.other_rows, sum(plan.step.caps), batch.root_context,
                batch.other_context,
            )  # fmt: skip
        rows = self.row_budget.rows(batch.num_roots) - batch.num_roots - batch.other_rows
        step_ms: Floats = plan.step_ms.copy()
        step_ms[1 + max(forced, rows) :] = IMPOSSIBLE_MS
        return step_ms

    def _mean_node_ms(self, step: NextStep, count: int) -> Floats:
        """Returns [count] ms of the attention of 0, 1, ... nodes at the mean context."""
        context = sum(step.context_lens) / len(step.context_lens)
        nodes: Floats = np.arange(count, dtype=np.float64)
        return nodes * (self.costs.attention_ms * context)

    def _draft_ms(self, plan: Plan) -> float:
        """Returns the milliseconds of the plan's draft forward."""
        depths = plan.depths[plan.depths > 0]
        return float(self.costs.draft_ms(len(depths), depths.mean())) if len(depths) else 0.0
