# SPDX-License-Identifier: Apache-2.0
"""The budget that follows the load: cost model, acceptance model, gate and allocation in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_specplug.budget.acceptance import AcceptanceModel, chosen_nodes
from vllm_specplug.budget.allocation import Allocation, allocate
from vllm_specplug.budget.cost_curve import Floats
from vllm_specplug.budget.draft_gate import IMPOSSIBLE_MS, DraftGate
from vllm_specplug.budget.fairness import FairnessWeights
from vllm_specplug.budget.lookup_gate import LookupGate
from vllm_specplug.budget.row_budget import RowBudget
from vllm_specplug.budget.step_cost import StepCostModel
from vllm_specplug.tree import ROOT, DraftTree

Ints = npt.NDArray[np.int64]

_EMPTY = DraftTree.empty()
_NO_INTS = np.empty(0, np.int64)

_STALE_STEPS = 100
"""Steps after which the time of a size that was not seen is in doubt."""
_STALE_STEPS_IF_SURPRISING = 4
"""The same where it had changed when it was last seen: is that so, or was the step interrupted?"""
_PLAIN_TRIALS, _SIZE_TRIALS = 0.002, 0.001
"""Shares of the tokens that may be lost to steps that only measure what they take: plain ones, and
ones of another size than looks best."""
_MAX_DEBT = 1.5
"""Tokens, in steps' worth, that trials of a size that had changed may take in advance."""
_REST_STEPS = 8
"""Steps for which a decision against any draft holds while the batch stays the same."""
_BEST_CHILD = 0.7
"""Probability of the best child of a node that was reached, before it is drafted."""
_FEW_NODES = 4
"""Nodes of a request whose average time a row is taken to cost when a draft begins."""
_MAX_TRIAL_COST = 0.5
"""Largest share of a step's tokens that a trial may lose; the plain step is tried at any price."""


@dataclass(frozen=True)
class NextStep:
    """What is known of the step that will verify the drafts now to be made."""

    # [R] requests that may draft
    req_ids: Sequence[str]
    # [R] tokens before each root
    context_lens: Sequence[int]
    # [R] most nodes of each tree
    caps: Sequence[int]
    # [R] deepest node a draft forward may be run for; 0 forbids it
    forward_limits: Sequence[int]
    # [R] requests that fixed their budget: they draft and verify `caps` nodes whatever it costs
    fixed: Sequence[bool]
    num_roots: int
    """Rows that yield a token whatever is drafted: of these R requests and of all others."""
    root_context: int
    """Tokens attended by those rows."""
    other_rows: int = 0
    """Prompt rows that share the step and yield none."""
    other_context: int = 0
    # [R] ms of work that a first draft forward for each waits for; empty for none
    debts: Sequence[float] = ()


@dataclass(frozen=True)
class LevelThresholds:
    """What another level of a draft must promise to be worth its time.

    Probabilities are those of the head: what it drafts has not been corrected yet.
    """

    node: float
    """Least probability of a node for its children to be drafted: they are less probable still, and
    none that is less probable pays for its row."""
    level: float
    """Least sum over the nodes of a level, of all requests, for the next one to be drafted."""


@dataclass
class _Nodes:
    """Nodes of several trees in a row."""

    # [R]
    counts: Ints
    # [N] index of each node's tree
    owners: Ints
    scores: npt.NDArray[np.float32]
    depths: Ints
    probabilities: Floats = field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> _Nodes:
        counts = np.array([len(tree.token_ids) for tree in trees], np.int64)
        if not counts.any():
            return cls(counts, _NO_INTS, np.empty(0, np.float32), _NO_INTS)
        return cls(
            counts,
            np.arange(len(trees)).repeat(counts),
            np.concatenate([tree.scores for tree in trees]),
            np.concatenate([tree.depths for tree in trees]).astype(np.int64),
        )

    def counts_of(self, some: npt.NDArray[np.bool_]) -> list[int]:
        """[R] how many of each tree's nodes are among `some` [N]."""
        counts: list[int] = np.bincount(self.owners[some], minlength=len(self.counts)).tolist()
        return counts


@dataclass
class Plan:
    """What was decided before drafting, for the trees that come of it: a device's are known to the
    host when later ones have been planned."""

    step: NextStep
    # [R] of the acceptance model, -1 for a request that ended meanwhile
    slots: Ints
    # [R] of the draft forward, 0 for none
    depths: Ints
    found: _Nodes
    is_plain_trial: bool = False
    is_trial: bool = False
    """Whether it only measures: a plain step, another size, or what a forward would find."""
    ratio: float = 1.0
    """Milliseconds of the step over those of a plain one, once its trees are decided on."""

    def leave_out(self, request: int) -> None:
        """Of a request that ended meanwhile nothing is learnt; its slot may be another's."""
        self.depths[request] = 0
        self.slots[request] = -1


class AdaptiveBudget:
    """Decides in every step which requests draft how deep, and which nodes are verified.

    Args:
        costs: what a step costs.
        row_budget: the rows that trees may fill, whatever would pay.
        deepest_forward: deepest node of a draft forward; 0 when the method has none.
    """

    def __init__(self, costs: StepCostModel, row_budget: RowBudget, deepest_forward: int) -> None:
        self.costs = costs
        self.row_budget = row_budget
        self.acceptance = AcceptanceModel()
        self.gate = DraftGate(deepest_forward) if deepest_forward else None
        self.lookups = LookupGate()
        self.fairness = FairnessWeights()
        self.planned: Plan | None = None
        """What `plan` decided last, until its trees are trimmed."""
        self.worth: LevelThresholds | None = None
        """Of the draft that was planned last; None where all of its levels are to be drafted."""
        # For how many more steps nothing is drafted for these requests, unless something is found.
        self._rest_steps = 0
        self._rest_ids: list[str] = []
        # Steps that went by so, for which nothing has been noted yet, and what they were like.
        self._rested = 0
        self._resting: Plan | None = None
        # Tokens, in steps' worth, that may be spent on trials of either kind.
        self._plain_credit = self._size_credit = 0.0
        # What the last step with drafts was expected to yield over a plain one, per millisecond.
        self._gain = 1.0
        self.saved_ms: float | None = 0.0
        """Milliseconds of plain steps that the trees trimmed last are expected to save; None for
        a step that only measures."""

    def plan(self, step: NextStep, found: Sequence[DraftTree]) -> list[int]:
        """[R] depth of the draft forward for each request, 0 for none.

        `found` are the trees that lookups made, at negligible cost.
        """
        self._note_rest()
        slots = self._slots_of(step.req_ids)
        nodes = self._nodes(found, slots)
        plan = self.planned = Plan(step, slots, np.zeros(len(step.req_ids), np.int64), nodes)
        self._plain_credit = min(self._plain_credit + _PLAIN_TRIALS, 1.0)
        self._size_credit = min(self._size_credit + _SIZE_TRIALS, 1.0)
        self.worth = None
        if self._rests(step, nodes):
            return plan.depths.tolist()
        plan.is_plain_trial = plan.is_trial = self._may_try_plain(step)
        if self.gate is not None and len(step.req_ids) and not plan.is_plain_trial:
            limits = np.asarray(step.forward_limits, np.int64)
            fixed = np.asarray(step.fixed, np.bool_)
            forced = sum(
                cap for cap, is_fixed in zip(step.caps, step.fixed, strict=True) if is_fixed
            )
            free = ~fixed[nodes.owners]
            step_ms = self._step_ms(step, forced, sum(step.caps)) + self._mean_node_ms(step)
            decision = self.gate.decide(
                slots,
                np.where(fixed, 0, limits),
                nodes.probabilities[free],
                nodes.owners[free],
                step.num_roots,
                self.costs.draft_ms,
                step_ms,
                self.fairness.weights(slots, step.num_roots),
                np.asarray(step.debts, np.float64) if len(step.debts) else None,
            )
            plan.depths = np.where(fixed, limits, decision.depths)
            plan.is_trial = decision.is_probe
            if not (decision.depths.any() or len(nodes.scores) or forced):
                self._rest_steps, self._rest_ids = _REST_STEPS - 1, list(step.req_ids)
                self._resting = plan
            # A probe is to see all there is.
            if self.costs.by_level and not decision.is_probe and not fixed.any():
                self.worth = self._worth(plan, step_ms)
        return plan.depths.tolist()

    def _rests(self, step: NextStep, found: _Nodes) -> bool:
        """Whether the last decision against any draft still holds: it takes longer than all else
        that a step without drafts does here."""
        if self._rest_steps and not len(found.scores) and step.req_ids == self._rest_ids:
            assert self.gate is not None
            self._rest_steps -= 1
            self.gate.rest(1)
            return True
        self._rest_steps = 0
        return False

    @property
    def is_resting(self) -> bool:
        """Whether a decision against any draft holds for steps to come."""
        return self._rest_steps > 0

    def rests_on(self) -> bool:
        """Whether the last decision against any draft holds for one more step of its requests, in
        which nothing is looked up. If so, that step is over: no `plan` and no `trim` belong to
        it."""
        if not self._rest_steps:
            return False
        self._rest_steps -= 1
        self._rested += 1
        return True

    def _note_rest(self) -> None:
        """Notes the steps of `rests_on`, all at once: one by one they would cost what they save."""
        steps, plan = self._rested, self._resting
        if not steps:
            return
        assert self.gate is not None and plan is not None
        self._rested = 0
        self.gate.rest(steps)
        self.lookups.advance(steps)
        self.fairness.step(plan.slots, plan.step.num_roots, 1.0, steps)
        self._plain_credit = min(self._plain_credit + steps * _PLAIN_TRIALS, 1.0)
        self._size_credit = min(self._size_credit + steps * _SIZE_TRIALS, 1.0)

    @property
    def expects_drafts(self) -> bool:
        """Whether drafts pay at present, for some requests at least."""
        return self.gate is None or self.gate.is_on

    def trim(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The parts of the trees, one per request of the step planned last, that pay for their
        rows."""
        plan, self.planned = self.planned, None
        assert plan is not None
        nodes = self._nodes(trees, plan.slots)
        return _subtrees(trees, nodes, self._pays(plan, nodes))

    def trim_late(
        self, plan: Plan, trees: Sequence[DraftTree], found: Sequence[DraftTree]
    ) -> list[int]:
        """Returns how many nodes of each tree `trim` would keep, for an earlier plan, which was
        made before its lookups were known.

        Args:
            found: trees of lookups only, as `plan` is given them.
        """
        plan.found = self._nodes(found, plan.slots)
        nodes = self._nodes(trees, plan.slots)
        counts: list[int] = nodes.counts_of(self._pays(plan, nodes))
        return counts

    def repeat(self, plan: Plan) -> None:
        """A step goes by for which an earlier plan holds, and for which nothing is decided."""
        self.fairness.step(plan.slots, plan.step.num_roots, plan.ratio)

    def _pays(self, plan: Plan, nodes: _Nodes) -> npt.NDArray[np.bool_]:
        """[N] the nodes that pay for their rows."""
        step = plan.step
        assert len(nodes.counts) == len(step.req_ids)
        if self.gate is not None and plan.depths.any():
            self._observe_forwards(self.gate, plan, nodes)
        self.saved_ms = None if plan.is_plain_trial else 0.0
        if plan.is_plain_trial or not (len(nodes.probabilities) or plan.depths.any()):
            self.fairness.step(plan.slots, step.num_roots, 1.0)
            return np.zeros(len(nodes.probabilities), np.bool_)
        drafted = np.flatnonzero(plan.depths)
        weights = self.fairness.weights(plan.slots, step.num_roots)
        kept = np.asarray(step.fixed, np.bool_)[nodes.owners]
        node_ms = self.costs.attention_ms * np.asarray(step.context_lens, np.float64)
        caps = np.asarray(step.caps)
        probabilities = nodes.probabilities
        if (nodes.counts > caps).any():
            probabilities = _capped(nodes, caps)
        probabilities = probabilities * weights[nodes.owners]
        free = np.flatnonzero(~kept & (probabilities > 0))
        kept &= probabilities > 0
        forced = int(kept.sum())
        step_ms = self._step_ms(step, forced, len(free))
        if len(drafted):
            step_ms += float(self.costs.draft_ms(len(drafted), plan.depths[drafted].mean()))
        base_tokens = step.num_roots + float(probabilities[kept].sum())
        own_ms = node_ms[nodes.owners[free]]
        allocation = allocate(probabilities[free], step_ms, base_tokens, own_ms)
        plain_ms = float(self._step_ms(step, 0, 0)[0])
        self._gain = max(1.0, allocation.rate * plain_ms / step.num_roots)
        self.saved_ms = plain_ms * (self._gain - 1.0)
        if not any(step.fixed):
            rows, best = step.num_roots + step.other_rows, allocation
            allocation = self._trial(
                rows, best, lambda ms: allocate(probabilities[free], ms, base_tokens, own_ms),
                step_ms,
            )  # fmt: skip
            plan.is_trial |= allocation is not best
        kept[free] = allocation.kept
        plan.ratio = allocation.milliseconds / plain_ms
        self.fairness.step(plan.slots, step.num_roots, plan.ratio)
        return kept

    def observe(
        self,
        req_ids: Sequence[str],
        trees: Sequence[DraftTree],
        paths: Sequence[Sequence[int]],
    ) -> float:
        """Learns from verified trees and their accepted paths; returns the number of accepted
        nodes that had been expected."""
        nodes = _Nodes.of(trees)
        if not len(nodes.scores):
            return 0.0
        slots = self.note_accepted(req_ids, paths)
        expected = self.acceptance.observe(
            nodes.scores,
            nodes.depths,
            slots[nodes.owners],
            chosen_nodes(paths, nodes.counts.tolist()),
        )
        return float(expected.sum())

    def note_accepted(self, req_ids: Sequence[str], paths: Sequence[Sequence[int]]) -> Ints:
        """Counts accepted nodes of a step that nothing else is learnt from; returns the requests'
        slots, int64 [R]."""
        slots = self._slots_of(req_ids)
        self.fairness.accepted(slots, np.array([len(path) for path in paths], np.int64))
        return slots

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops requests that ended."""
        self._note_rest()
        gone = set(req_ids)
        self.acceptance.forget(gone)
        if not gone.isdisjoint(self._rest_ids):
            self._rest_steps, self._rest_ids, self._resting = 0, [], None

    def _slots_of(self, req_ids: Sequence[str]) -> Ints:
        slots = np.empty(len(req_ids), np.int64)
        for i, req_id in enumerate(req_ids):
            slots[i], is_new = self.acceptance.slot_of(req_id)
            if is_new:
                self.fairness.reset(int(slots[i]))
                if self.gate is not None:
                    self.gate.reset(int(slots[i]))
        return slots

    def _nodes(self, trees: Sequence[DraftTree], slots: Ints) -> _Nodes:
        nodes = _Nodes.of(trees)
        if len(nodes.scores):
            nodes.probabilities = self.acceptance.probabilities(
                nodes.scores, nodes.depths, slots[nodes.owners]
            )
        return nodes

    def _step_ms(self, step: NextStep, forced: int, num_nodes: int) -> Floats:
        """[num_nodes + 1] ms of the step with `forced` nodes and that many more; their own
        attention is not included."""
        rows = step.num_roots + forced
        ms = self.costs.decode_ms(
            step.num_roots, forced, step.other_rows, num_nodes, step.root_context,
            step.other_context,
        )  # fmt: skip
        most = self.row_budget.rows(step.num_roots)
        ms[1 + max(0, most - rows - step.other_rows) :] = IMPOSSIBLE_MS
        return ms

    def _mean_node_ms(self, step: NextStep) -> Floats:
        """[sum of caps + 1] ms of the attention of that many nodes at the average context."""
        context = sum(step.context_lens) / len(step.context_lens)
        nodes: Floats = np.arange(sum(step.caps) + 1, dtype=np.float64)
        return nodes * (self.costs.attention_ms * context)

    def _worth(self, plan: Plan, step_ms: Floats) -> LevelThresholds | None:
        """What a level must promise where drafting yields what it last did; `step_ms` by nodes."""
        drafted = int(np.count_nonzero(plan.depths))
        possible = int(np.count_nonzero(step_ms < IMPOSSIBLE_MS)) - 1
        nodes = min(_FEW_NODES * drafted, possible)
        if nodes < 1:
            return None
        rate = self._gain * plan.step.num_roots / float(step_ms[0])
        row_ms = (float(step_ms[nodes]) - float(step_ms[0])) / nodes
        first, second = self.costs.draft_ms(drafted, np.array([1, 2]))
        return LevelThresholds(rate * row_ms, rate * float(second - first) / _BEST_CHILD)

    def _may_try_plain(self, step: NextStep) -> bool:
        """Whether this step goes without drafts only to measure a plain step.

        While drafts pay, no step is plain, and plain decoding becoming cheaper would go unnoticed.
        """
        if any(step.fixed) or not len(step.req_ids):
            return False
        loss = 1.0 - 1.0 / self._gain
        rows, curve = step.num_roots + step.other_rows, self.costs.forward
        is_again = curve.is_surprising(rows)
        is_due = curve.age(rows, plain=True) >= (
            _STALE_STEPS_IF_SURPRISING if is_again else _STALE_STEPS
        )
        if loss == 0.0 or not is_due or loss > self._plain_credit + _MAX_DEBT * is_again:
            return False
        self._plain_credit -= loss
        return True

    def _trial(
        self,
        rows: int,
        best: Allocation,
        allocate_at: Callable[[Floats], Allocation],
        step_ms: Floats,
    ) -> Allocation:
        """The next smaller or larger size instead of the best one, when its time is in doubt and
        little is lost; else the best one."""
        curve = self.costs.forward
        chosen = int(best.kept.sum())
        if not chosen:
            return best
        for knot in curve.sizes_near(rows + chosen):
            count = min(int(knot) - rows, len(step_ms) - 1)
            is_again = curve.is_surprising(knot)
            is_due = curve.age(knot) >= (_STALE_STEPS_IF_SURPRISING if is_again else _STALE_STEPS)
            if count < 1 or count == chosen or not is_due:
                continue
            only = np.full(len(step_ms), IMPOSSIBLE_MS)
            only[count] = step_ms[count]
            other = allocate_at(only)
            loss = 1.0 - other.rate / best.rate
            if loss <= min(self._size_credit + _MAX_DEBT * is_again, _MAX_TRIAL_COST):
                self._size_credit -= loss
                return other
        return best

    def _observe_forwards(self, gate: DraftGate, plan: Plan, nodes: _Nodes) -> None:
        drafted = np.flatnonzero(plan.depths)
        place = np.full(len(plan.depths), -1)
        place[drafted] = np.arange(len(drafted))

        def columns(some: _Nodes) -> tuple[Floats, Ints, Ints]:
            owners = place[some.owners]
            inside = owners >= 0
            return some.probabilities[inside], some.depths[inside], owners[inside]

        gate.observe(plan.slots[drafted], plan.depths[drafted], columns(nodes), columns(plan.found))


def _capped(nodes: _Nodes, caps: Ints) -> Floats:
    """The probabilities, zero for all but the best `caps` nodes of each tree."""
    probabilities = nodes.probabilities.copy()
    starts = np.cumsum(nodes.counts) - nodes.counts
    for tree in np.flatnonzero(nodes.counts > caps):
        own = probabilities[starts[tree] : starts[tree] + nodes.counts[tree]]
        own[np.argsort(-own, kind="stable")[caps[tree] :]] = 0.0
    return probabilities


def _subtrees(
    trees: Sequence[DraftTree], nodes: _Nodes, kept: npt.NDArray[np.bool_]
) -> list[DraftTree]:
    """The kept nodes of each tree in their old order."""
    result = []
    first = 0
    sizes, counts = nodes.counts_of(kept), nodes.counts.tolist()
    for tree, size, count in zip(trees, sizes, counts, strict=True):
        if size == count:
            result.append(tree)
        elif size == 0:
            result.append(_EMPTY)
        else:
            own = kept[first : first + count]
            result.append(tree.prefix(size) if own[:size].all() else _subtree(tree, own))
        first += count
    return result


def _subtree(tree: DraftTree, kept: npt.NDArray[np.bool_]) -> DraftTree:
    parents = tree.parent_indices
    # Rounding may rank a child before its parent; seldom, and then the child is left out.
    while (orphans := kept & (parents != ROOT) & ~kept[parents]).any():
        kept = kept & ~orphans
    place = np.cumsum(kept) - 1
    parents = parents[kept]
    return DraftTree(
        token_ids=tree.token_ids[kept],
        parent_indices=np.where(parents == ROOT, ROOT, place[parents]).astype(np.int32),
        depths=tree.depths[kept],
        scores=tree.scores[kept],
    )
