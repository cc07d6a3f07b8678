# SPDX-License-Identifier: Apache-2.0
"""The budget as a whole: trees stay trees, load shrinks them, equal inputs give equal decisions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.budget.calibrations import ROWS, calibration
from vllm_specplug.budget.adaptive_budget import AdaptiveBudget, Batch, NextStep
from vllm_specplug.budget.step_cost import Calibration, StepCostModel
from vllm_specplug.options import RowBudget
from vllm_specplug.tree import DraftTree, merge_trees

DEEPEST = 5
CALLS_PER_REQUEST = 8


def budget(**kwargs: object) -> AdaptiveBudget:
    return AdaptiveBudget(
        StepCostModel(calibration(**kwargs)), RowBudget(64, 4096, 4096, 1), DEEPEST
    )


def tree(probability: float, depth: int = DEEPEST) -> DraftTree:
    """A chain with a sibling at each depth that is a tenth as likely."""
    best = [10 * level for level in range(1, depth + 1)]
    scores = np.log(probability) * np.arange(1, depth + 1)
    chains = [DraftTree.chain(best, scores)]
    for i in range(depth):
        sibling = [*scores[:i], scores[i] - 2.3]
        chains.append(DraftTree.chain([*best[:i], best[i] + 1], sibling))
    return merge_trees(chains, 2 * depth)


def next_step(num_reqs: int, **changes: object) -> NextStep:
    fields: dict = {
        "req_ids": [f"r{i}" for i in range(num_reqs)],
        "context_lens": [200] * num_reqs,
        "caps": [16] * num_reqs,
        "forward_limits": [DEEPEST] * num_reqs,
        "fixed": [False] * num_reqs,
        "batch": Batch(num_reqs, 200 * num_reqs),
    }
    return NextStep(**{**fields, **changes})


def run(
    controller: AdaptiveBudget, num_reqs: int, steps: int, probability: float, **changes: object
) -> list[int]:
    """Nodes of each step while drafts are worth `probability` a level."""
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(steps):
        step = next_step(num_reqs, **changes)
        plan = controller.plan(step, [DraftTree.empty()] * num_reqs)
        drafted = [tree(probability, d) if d else DraftTree.empty() for d in plan.depths]
        trees = controller.trim(plan, drafted)
        paths = []
        for one in trees:
            one.validate()
            path, node = [], -1
            while rng.random() < probability:
                node = one.child_of(node, 10 * (len(path) + 1))
                if node is None:
                    break
                path.append(node)
            paths.append(path)
        controller.observe(step.req_ids, trees, paths)
        sizes.append(sum(t.num_nodes for t in trees))
    return sizes


def test_hard_limits_hold_and_leave_trees() -> None:
    free = [30.0 + 0.001 * r for r in ROWS]
    controller = AdaptiveBudget(
        StepCostModel(calibration(times=free)), RowBudget(64, 10, 10, 1), DEEPEST
    )
    assert max(run(controller, 4, 20, 0.9)) <= 6
    controller = budget(times=free)
    plan = controller.plan(next_step(3, caps=[1, 4, 16]), [DraftTree.empty()] * 3)
    trees = controller.trim(plan, [tree(0.7)] * 3)
    # Rows that cost nothing are used: the last tree has no more nodes.
    assert [t.num_nodes for t in trees] == [1, 4, 10]
    for one in trees:
        one.validate()


def test_rows_that_a_fixed_budget_leaves_are_not_given_to_others() -> None:
    controller = AdaptiveBudget(
        StepCostModel(calibration(times=[30.0 + 0.001 * r for r in ROWS])),
        RowBudget(64, 64, 64, 1),
        DEEPEST,
    )
    # Prompt rows fill the step beyond its limit.
    batch = Batch(2, 400, other_rows=100)
    step = next_step(2, caps=[16, 16], fixed=[True, False], batch=batch)
    plan = controller.plan(step, [DraftTree.empty(), tree(0.9)])
    trees = controller.trim(plan, [tree(0.9, depth=2), tree(0.9)])
    assert [t.num_nodes for t in trees] == [4, 0]


def test_a_forward_may_end_with_fewer_nodes_than_its_lookups() -> None:
    controller = budget(times=[30.0 + 0.001 * r for r in ROWS])
    plan = controller.plan(next_step(1), [tree(0.3, depth=1)])
    assert plan.depths.any()
    assert [t.num_nodes for t in controller.trim(plan, [DraftTree.empty()])] == [0]


def test_trials_of_changed_costs_keep_the_limit_on_rows() -> None:
    costs = StepCostModel(calibration())
    controller = AdaptiveBudget(costs, RowBudget(64, 10, 4096, 1), DEEPEST)
    # Steps with prompts took longer than before, so the size is due for a trial.
    costs.forward.observe(16, 3.0 * float(costs.forward(16)))
    for _ in range(10):
        costs.forward.observe(1, float(costs.forward(1)))
    assert costs.forward.is_surprising(16)
    assert max(run(controller, 1, steps=20, probability=0.9)) <= 9


def test_prompt_rows_that_share_the_step_are_counted() -> None:
    alone = np.mean(run(budget(), 2, 40, 0.6)[20:])
    shared = np.mean(run(budget(), 2, 40, 0.6, batch=Batch(2, 400, 8, 100))[20:])
    # The flat part of the curve is used up by the prompt.
    assert shared < alone


def test_long_contexts_get_fewer_nodes() -> None:
    controller = budget(attention_ms=2e-3)
    step = next_step(2, context_lens=[100, 4000], batch=Batch(2, 4100))
    plan = controller.plan(step, [DraftTree.empty()] * 2)
    short, long = controller.trim(plan, [tree(0.7), tree(0.7)])
    assert short.num_nodes > long.num_nodes


def test_a_decision_against_drafts_holds_for_some_steps_of_the_same_batch() -> None:
    controller = budget(draft=60.0)
    assert controller.gate is not None
    decided = []
    decide = controller.gate.decide
    controller.gate.decide = lambda *args: decided.append(1) or decide(*args)  # type: ignore
    nothing = [DraftTree.empty()] * 3

    def go(step: NextStep, found: list[DraftTree]) -> int:
        before = len(decided)
        plan = controller.plan(step, found)
        controller.trim(plan, found)
        return len(decided) - before

    assert sum(go(next_step(3), nothing) for _ in range(80)) == 10
    # Another batch, and what lookups found, are looked at.
    assert go(next_step(3), nothing) == 1
    assert go(next_step(2), nothing[:2]) == 1
    assert go(next_step(2), [tree(0.9), nothing[0]]) == 1
    assert go(next_step(2), nothing[:2]) == 1


def test_drafts_by_level_cost_by_their_levels() -> None:
    rows = (1.0, 100.0)
    costs = StepCostModel(
        Calibration(rows, (20.0, 40.0), (0.1, 0.2), 0.0, 0.0, (1.0, 100.0), (0.1, 10.0)),
        by_level=True,
    )
    assert float(costs.draft_ms(1, 5)) == pytest.approx(5 * float(costs.draft_ms(1, 1)))
    assert float(costs.draft_ms(4, 1)) < 2 * float(costs.draft_ms(1, 1))
    before = float(costs.draft_ms(4, 2))
    for _ in range(50):
        costs.observe_draft(4, 2, 2 * before)
    assert float(costs.draft_ms(4, 2)) > 1.5 * before
    controller = AdaptiveBudget(costs, RowBudget(64, 4096, 4096, 1), DEEPEST)
    for _ in range(30):
        plan = controller.plan(next_step(1), [DraftTree.empty()])
        if plan.depths.any():
            thresholds = plan.thresholds
        trees = controller.trim(plan, [tree(0.8) if plan.depths.any() else DraftTree.empty()])
        controller.observe(["r0"], trees, [[0, 1] if trees[0].num_nodes > 1 else []])
    assert thresholds is not None and 0 < thresholds.node < 0.2
    assert thresholds.node < thresholds.level < 1
    # Whoever fixed its budget gets all of it.
    assert controller.plan(next_step(1, fixed=[True]), [DraftTree.empty()]).thresholds is None
    block = budget().plan(next_step(1), [DraftTree.empty()])
    assert block.depths.any() and block.thresholds is None


def count_calls(work: Callable[[], object]) -> int:
    """Functions that `work` calls, Python's and built-in ones: its work, counted instead of
    timed."""
    calls = 0

    def noted(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(noted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def test_a_decision_takes_few_calls_for_each_request() -> None:
    def calls(num_reqs: int) -> int:
        controller = budget()
        run(controller, num_reqs, 5, 0.5)
        trees = [tree(0.5)] * num_reqs
        step = next_step(num_reqs)

        def decide() -> None:
            plan = controller.plan(step, [DraftTree.empty()] * num_reqs)
            plan.depths[:] = 0  # learning from a forward is no decision
            controller.trim(plan, trees)

        decide()
        return count_calls(decide)

    few, many = calls(8), calls(64)
    # Nodes are never looked at one by one: a tree has ten.
    assert (many - few) / 56 < CALLS_PER_REQUEST, (few, many)
