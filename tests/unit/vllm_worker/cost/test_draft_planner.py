# SPDX-License-Identifier: Apache-2.0
"""The planner applies what requests and options say, and learns from steps only what they show."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from tests.unit.vllm_worker.planning import (
    MAX_NODES,
    ChainDrafter,
    options_of,
    planner_of,
    requests_of,
)
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.options import parse_request_budget, request_budget_limit
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker.cost import draft_planner
from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner, StepRequest, best_nodes


def test_each_request_gets_what_it_asks_for() -> None:
    planner = planner_of()
    ask = [None, {"specplug_tree_budget": 0}, {"specplug_tree_budget": 2}]
    got = [planner.nodes_for(str(i), extra, 3) for i, extra in enumerate(ask)]
    assert got == [(MAX_NODES, "budget"), (0, "opted_out"), (2, "batch")]


def test_fixed_budgets_share_the_rows_and_requests_may_differ() -> None:
    planner = planner_of(rows=20, tree_budget=6)
    assert planner.nodes_for("a", None, 2) == (6, "batch")
    assert planner.nodes_for("a", None, 5) == (3, "batch")
    assert planner.nodes_for("a", None, 12) == (0, "batch")
    assert planner.nodes_for("b", {"specplug_tree_budget": 8}, 2) == (8, "batch")
    assert planner.nodes_for("b", {"specplug_tree_budget": 8}, 4)[0] == 4
    # Full steps leave none, though the request asked for some.
    assert planner.nodes_for("b", {"specplug_tree_budget": 8}, 20) == (0, "batch")


def test_a_request_that_ended_may_come_back_with_another_wish() -> None:
    planner = planner_of()
    assert planner.nodes_for("a", {"specplug_tree_budget": 0}, 1)[0] == 0
    planner.forget(["a"])
    assert planner.nodes_for("a", None, 1)[0] == MAX_NODES


# What a client can send, and what offline callers can.
HOSTILE = [
    -1, 2**31, 10**400, 10**5000, -(10**30), "many", "", 2.5, float("nan"), float("inf"), True,
    None, [1], [[1], [2]], {}, ["x" * 10**6], np.arange(3), b"8",
]  # fmt: skip


def test_a_value_that_cannot_be_used_is_refused_by_name_and_a_worker_ignores_it() -> None:
    for planner, own in (
        (planner_of(), (MAX_NODES, "budget")),
        (planner_of(tree_budget=6), (6, "batch")),
    ):
        for i, value in enumerate(HOSTILE):
            asked = {"specplug_tree_budget": value}
            with pytest.raises(ValueError, match="specplug_tree_budget="):
                parse_request_budget(asked, planner.options)
            assert planner.nodes_for(str(i), asked, 1) == own, i


def test_the_operator_limits_what_requests_may_ask_for() -> None:
    def most(**changes: Any) -> int:
        options = options_of(num_speculative_tokens=256, **changes)
        limit = request_budget_limit(options)
        legal = parse_request_budget({"specplug_tree_budget": limit}, options)
        with pytest.raises(ValueError, match=rf" to \w+={limit}\."):
            parse_request_budget({"specplug_tree_budget": limit + 1}, options)
        assert legal == limit
        return limit

    assert most() == most(tree_budget=0) == 32
    assert (most(tree_budget=20), most(tree_budget=200)) == (40, 256)
    assert (most(max_request_budget=0), most(max_request_budget=100)) == (0, 100)


def test_drafts_where_it_pays_and_not_where_it_does_not() -> None:
    cheap, dear = ChainDrafter(), ChainDrafter()
    planner = planner_of()
    trees = planner.draft(cheap, *requests_of(planner, [None] * 3))
    assert cheap.asked and all(tree.num_nodes for tree in trees)
    planner = planner_of(draft_ms=60.0)
    trees = planner.draft(dear, *requests_of(planner, [None] * 3))
    assert not dear.asked and not any(tree.num_nodes for tree in trees)
    assert planner.stats.plain_steps == {"budget": 3}
    assert planner.stats.tree_budget == 0


@pytest.mark.parametrize("max_requests", [4, 8])
def test_trees_leave_room_for_a_waiting_request(max_requests: int) -> None:
    """Where the scheduler's rows are few: it serves running requests first."""
    planner = planner_of(rows=12, scheduler_rows=12, max_requests=max_requests)
    trees = planner.draft(ChainDrafter(score=-0.01), *requests_of(planner, [None] * 4))
    rows = sum(1 + tree.num_nodes for tree in trees)
    assert 4 < rows <= 12 - 12 // 5 if max_requests > 4 else rows == 12


@pytest.mark.parametrize("pays", [True, False])
def test_ranks_run_the_first_ranks_draft_forwards(
    pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that needs all ranks follows the first rank's plan, not local costs."""
    planner, drafter = planner_of(draft_ms=0.3 if pays else 1e3), ChainDrafter()
    said: list[int] = []

    def first_rank_values(values: list[float]) -> list[float]:
        node, level, *depths = values
        said.extend(depths)
        return [0.25, 0.5, *([0.0] * len(depths) if pays else range(1, 1 + len(depths)))]

    monkeypatch.setattr(draft_planner, "first_rank_values", first_rank_values)
    drafter.first_rank = lambda tensor: tensor
    seen: list[DraftRequests] = []
    propose = drafter.propose
    drafter.propose = lambda requests: seen.append(requests) or propose(requests)  # type: ignore
    requests, batch = requests_of(planner, [None] * 3)
    trees = planner.draft(drafter, requests, batch)
    assert any(said) == pays
    assert drafter.asked == ([] if pays else [[1, 2, 3]])
    assert len(trees) == 3
    for asked in seen:
        assert (asked.min_node_prob, asked.min_level_prob) == (0.25, 0.5)


def test_rows_reserved_ahead_are_filled_and_the_decision_holds_for_the_step_after() -> None:
    """Whatever was reserved: what would pay does not depend on it, or it could never grow."""
    wanted = []
    for room in ([0, 0, 0], [1, 2, 8], [8, 8, 8]):
        planner = planner_of()
        requests, batch = requests_of(planner, [None] * 3)
        drafter = ChainDrafter()
        trees = planner.draft(drafter, requests, batch, room)
        expected = [min(depth, most) for depth, most in zip(drafter.asked[0], room, strict=True)]
        assert [tree.num_nodes for tree in trees] == expected
        wanted.append(planner.wanted)
    planner = planner_of()
    trees = planner.draft(ChainDrafter(), *requests_of(planner, [None] * 3))
    assert wanted == [planner.wanted] * 3 == [[tree.num_nodes for tree in trees]] * 3
    assert sum(planner.wanted) > 0


def test_nothing_is_reserved_where_drafts_do_not_pay_but_for_whom_fixed_it() -> None:
    planner = planner_of(draft_ms=60.0)
    requests, batch = requests_of(planner, [None, {"specplug_tree_budget": 3}, None])
    planner.draft(ChainDrafter(), requests, batch, [8, 0, 8])
    assert planner.wanted == [0, 3, 0]


def test_the_best_nodes_of_a_tree_are_one() -> None:
    tree = _tree([1, 2, 3, 4, 5], [-1, -1, 0, 1, 3], [1, 1, 2, 2, 3], [-1.0, -0.2, -3.0, -0.2, -2])
    assert best_nodes(tree, 0).num_nodes == 0
    assert best_nodes(tree, 1).token_ids.tolist() == [2]
    three = best_nodes(tree, 3)
    assert three.token_ids.tolist() == [1, 2, 4] and three.parent_indices.tolist() == [-1, -1, 1]
    assert best_nodes(tree, 4).token_ids.tolist() == [1, 2, 4, 5]
    assert best_nodes(tree, 5) is tree


class _LateDrafter(ChainDrafter):
    """Puts work off, and takes its time for it."""

    def __init__(self, clock: list[float], **options: Any) -> None:
        super().__init__(**options)
        self.clock, self.caught_up = clock, 0

    def materialize_context(self, requests: DraftRequests) -> None:
        self.caught_up += 1
        self.clock[0] += 50.0

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        self.clock[0] += 3.0
        return super().propose(requests)


def test_work_of_steps_without_drafts_is_not_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: 1e-3 * clock[0])
    planner = planner_of()
    drafter = _LateDrafter(clock, score=-0.01)
    learnt = []
    assert planner.adaptive is not None
    planner.adaptive.costs.observe_draft = lambda *args: learnt.append(args)  # type: ignore
    for _ in range(8):
        planner.begin_step()
        planner.draft(drafter, *requests_of(planner, [None] * 2))
        assert planner._now is not None
        planner._now.is_warm = True
    assert drafter.asked and drafter.caught_up == 1
    assert planner._now.draft_ms == pytest.approx(3.0)


def _learnt_drafts(planner: DraftPlanner, drafter: Any) -> list[tuple[Any, ...]]:
    """What is learnt of drafts whose steps nobody looks at before they are over."""
    learnt: list[tuple[Any, ...]] = []
    assert planner.adaptive is not None
    planner.adaptive.costs.observe_draft = lambda *args: learnt.append(args)  # type: ignore
    for _ in range(8):
        planner.begin_step()
        planner.draft(drafter, *requests_of(planner, [None] * 2))
    return learnt


def test_a_draft_costs_the_levels_that_it_ran_whether_or_not_its_step_is_looked_at() -> None:
    drafter = ChainDrafter(score=-0.01)
    learnt = _learnt_drafts(planner_of(), drafter)
    assert len(learnt) > 3 and max(depth for _, depth, _ in learnt) > 1
    drafter.levels_run = 1
    assert {depth for _, depth, _ in _learnt_drafts(planner_of(), drafter)} == {1.0}


def test_idle_time_and_prompt_chunks_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    planner = planner_of()
    assert planner.adaptive is not None
    costs = planner.adaptive.costs
    verify, rest = float(costs.verify_ms(5, 5, 0)), costs.rest_ms
    for step in range(30):
        planner.begin_step()
        now[0] += 5.0
        chunk = StepRequest(0, 200, 201, 0, DraftTree.empty())
        planner.observe([chunk], [f"r{step}"], now[0])
        now[0] += 60.0
    assert (float(costs.verify_ms(5, 5, 0)), costs.rest_ms) == (verify, rest)


def _tree(tokens: list[int], parents: list[int], depths: list[int], scores: list[float]) -> Any:
    return DraftTree(
        np.array(tokens),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.array(scores, np.float32),
    )


# What a fault is, tests of trees tell.
BROKEN = {
    "a child outscores its parent and stands first": _tree([1, 2], [1, -1], [2, 1], [-0.1, -0.2]),
    "a token past the vocabulary": _tree([1000], [-1], [1], [-0.1]),
}


class _BrokenDrafter(ChainDrafter):
    """A sound tree for the first request, a broken one for the second."""

    def __init__(self, broken: DraftTree, in_lookups: bool) -> None:
        super().__init__()
        self.broken, self.in_lookups = broken, in_lookups

    def lookup(self, requests: DraftRequests) -> list[DraftTree]:
        found = super().lookup(requests)
        return [found[0], self.broken] if self.in_lookups else found

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        return [DraftTree.chain([7], [-0.1]), self.broken]


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("in_lookups", [False, True])
@pytest.mark.parametrize("tree_budget", ["auto", MAX_NODES])
def test_an_invalid_tree_is_dropped_counted_and_told_once(
    name: str,
    in_lookups: bool,
    tree_budget: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever vLLM's own logging configuration has become in this process.
    log = logging.getLogger("vllm.specplug")
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "disabled", False)
    caplog.set_level(logging.WARNING, logger=log.name)
    planner = planner_of(tree_budget=tree_budget)
    drafter = _BrokenDrafter(BROKEN[name], in_lookups)
    for step in (1, 2):
        requests, batch = requests_of(planner, [None, None])
        trees = planner.draft(drafter, requests, batch)
        assert [tree.num_nodes for tree in trees] == [1, 0]
        assert planner.stats.plain_steps == {"invalid_tree": step}
    warnings = [r.getMessage() for r in caplog.records if r.name == "vllm.specplug"]
    assert len(warnings) == 1 and "DraftTree:" in warnings[0]


class _GreedyDrafter(ChainDrafter):
    """Three nodes more than anybody asked for."""

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        sizes = [budget + 3 for budget in requests.budgets]
        return [DraftTree.chain(range(n), self.score * np.arange(1, n + 1)) for n in sizes]


@pytest.mark.parametrize("tree_budget", ["auto", 6])
def test_no_tree_outgrows_its_budget(tree_budget: Any) -> None:
    planner = planner_of(tree_budget=tree_budget)
    requests, batch = requests_of(planner, [None, {"specplug_tree_budget": 2}])
    trees = planner.draft(_GreedyDrafter(score=-0.01), requests, batch)
    assert trees[1].num_nodes == 2
    assert all(t.num_nodes <= b for t, b in zip(trees, requests.budgets, strict=True))


class _LostDrafter(ChainDrafter):
    """Its first request can have no context."""

    def pending_context_ms(self, req_ids: Any) -> list[float]:
        return [float("inf") if req_id == "r0" else 0.0 for req_id in req_ids]


@pytest.mark.parametrize(
    ("options", "extra"), [({"tree_budget": 4}, None), ({}, {"specplug_tree_budget": 4})]
)
def test_fixed_budgets_without_a_context_have_no_draft(
    options: dict[str, Any], extra: dict | None
) -> None:
    planner, drafter = planner_of(**options), _LostDrafter()
    trees = planner.draft(drafter, *requests_of(planner, [extra] * 2))
    assert [tree.num_nodes for tree in trees] == [0, 4]
    assert planner.stats.plain_steps == {"no_context": 1}
    planner.forget(["r1"])
    trees = planner.draft(drafter, *requests_of(planner, [extra]))
    assert [tree.num_nodes for tree in trees] == [0] and len(drafter.asked) == 1


# -- lookups that do not pay ---------------------------------------------------------------------


class _FindingDrafter(ChainDrafter):
    """Finds chains of some score by looking up, before a forward or in place of one."""

    def __init__(self, score: float, has_forward: bool) -> None:
        super().__init__(score)
        self.forward_depth = 4 if has_forward else 0
        self.looked = 0

    def _find(self, requests: DraftRequests) -> list[DraftTree]:
        self.looked += 1
        return [DraftTree.chain([1], np.array([self.score]))] * len(requests)

    def lookup(self, requests: DraftRequests) -> list[DraftTree]:
        return self._find(requests) if self.forward_depth else super().lookup(requests)

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        return super().propose(requests) if self.forward_depth else self._find(requests)


@pytest.mark.parametrize("has_forward", [True, False])
@pytest.mark.parametrize(
    ("score", "extra", "looked"),
    [
        # Too improbable to be verified: looked up in every ninth of the last 90 steps.
        (-6.0, None, 16 + 10),
        (-0.01, None, 106),
        # A request that fixed its budget is drafted for.
        (-6.0, {"specplug_tree_budget": 2}, 106),
    ],
)
def test_lookups_rest_where_they_do_not_pay(
    has_forward: bool, score: float, extra: dict[str, int] | None, looked: int
) -> None:
    planner = planner_of(draft_ms=60.0)
    drafter = _FindingDrafter(score, has_forward)
    for _ in range(106):
        trees = planner.draft(drafter, *requests_of(planner, [extra, None]))
    assert drafter.looked == looked
    if score > -1.0:
        assert all(tree.num_nodes for tree in trees)
