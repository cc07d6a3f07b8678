# SPDX-License-Identifier: Apache-2.0
"""The adaptive budget on trees that the host learns of late."""

from __future__ import annotations

import numpy as np

from tests.unit.vllm_worker.planning import MAX_NODES, planner_of
from vllm_specplug.budget.adaptive_budget import Batch, Plan
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker.cost.late_budget import LateBudget

NODES, DEEPEST = MAX_NODES, 4
SURE = DraftTree.chain(range(6), -0.01 * np.arange(1, 7))
VAIN = DraftTree.chain(range(6), -5.0 * np.arange(1, 7))
NONE = DraftTree.empty()


def late_budget(*extras: dict | None, deepest: int = DEEPEST) -> LateBudget:
    """Of requests "0", "1", ... with these arguments; rows cost as those of a small model."""
    planner = planner_of(deepest=deepest, max_request_budget=NODES)
    for i, extra in enumerate(extras):
        planner.nodes_for(str(i), extra, len(extras))
    return LateBudget(planner)


def plan(late: LateBudget, count: int) -> Plan:
    return late.plan(
        [str(i) for i in range(count)], [100] * count, [NODES] * count, [9] * count,
        Batch(num_roots=count, root_context=100 * count),
    )  # fmt: skip


def test_what_pays_is_asked_for_whatever_had_room() -> None:
    late = late_budget(None, None)
    made = plan(late, 2)
    assert (made.depths > 0).all() and made.depths.max() <= DEEPEST
    wanted = late.wanted(made, [SURE, VAIN], [NONE, NONE], room=[2, 3])
    assert wanted["0"] >= 5 and wanted["1"] == 0
    assert late.planner.stats.tree_budget == 3
    assert not late.planner.stats.plain_steps
    # Where the step has rows for what is wanted, one request is plain.
    assert late.wanted(made, [SURE, VAIN], [NONE, NONE], room=None) == wanted
    assert late.planner.stats.tree_budget == wanted["0"]
    assert late.planner.stats.plain_steps == {"budget": 1}


def test_plans_may_be_under_way_while_others_are_made() -> None:
    """The same as if each was followed by its trees, until these teach something."""
    late, other = late_budget(None), late_budget(None)
    first, second = plan(late, 1), plan(late, 1)
    assert first is not second and first.slots is not second.slots
    wanted = [late.wanted(p, [SURE], [NONE], [NODES]) for p in (first, second)]
    assert wanted[0] == other.wanted(plan(other, 1), [SURE], [NONE], [NODES])
    assert wanted[1] == wanted[0]


def test_a_request_that_fixed_its_budget_keeps_its_rows() -> None:
    late = late_budget({"specplug_tree_budget": 3}, None)
    made = late.plan(
        ["0", "1"], [100, 100], [3, NODES], [9, 9], Batch(num_roots=2, root_context=200)
    )
    assert made.step.fixed == [True, False] and made.depths[0] == DEEPEST
    wanted = late.wanted(made, [VAIN.prefix(3), VAIN], [NONE, NONE], [3, NODES])
    assert wanted == {"0": 3, "1": 0}


def test_requests_that_ended_teach_nothing_and_get_nothing() -> None:
    late = late_budget(None, None)
    made = plan(late, 2)
    late.planner.forget(["0"])
    wanted = late.wanted(made, [SURE, SURE], [SURE, SURE], [NODES, NODES])
    assert list(wanted) == ["1"] and made.depths[0] == 0
    assert list(late._lookups) == ["1"]
    # None of them comes back by being asked about.
    acceptance = late.budget.acceptance
    assert list(acceptance._slots) == ["1"]


def test_lookups_of_an_earlier_step_are_what_a_forward_must_beat() -> None:
    late = late_budget(None)
    made = plan(late, 1)
    assert not len(made.lookup_nodes.scores)
    late.wanted(made, [SURE], [SURE], [NODES])
    assert plan(late, 1).lookup_nodes.counts.tolist() == [6]
    late.forget(["0"])
    assert not len(plan(late, 1).lookup_nodes.scores)


def test_empty_trees_are_counted_with_their_reason() -> None:
    for deepest, reason in ((DEEPEST, "budget"), (0, "no_draft")):
        late = late_budget(None, deepest=deepest)
        late.wanted(plan(late, 1), [NONE], [NONE], [NODES])
        assert dict(late.planner.stats.plain_steps) == {reason: 1}
