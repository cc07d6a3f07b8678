# SPDX-License-Identifier: Apache-2.0
"""The adaptive budget in a running engine; see test_budget.py.

Costs are set by the checks and then left alone, so that what is decided does not depend on how
busy the machine is; only acceptance is learnt.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.option_checks import PROMPTS, greedy, seeded
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Pair, assert_same_output, generate, pair, sequences_of
from vllm_specplug.budget import AdaptiveBudget, Calibration, StepCostModel

AUTO = {"tree_budget": "auto"}


class _FrozenCosts(StepCostModel):
    """Costs that real steps do not change: `ms` at each of `rows`."""

    def __init__(self, rows: tuple[float, ...], ms: tuple[float, ...]) -> None:
        super().__init__(
            Calibration(rows, ms, tuple(1e-3 * r for r in rows), 0.0, 0.0, (1.0, 100.0), (0.1, 1.0))
        )

    def observe_verify(self, *args: Any, **kwargs: Any) -> None: ...

    def observe_rest(self, *args: Any, **kwargs: Any) -> None: ...


# Rows are free, and rows are so dear beyond the twelfth that none pays there.
FLAT = ((1.0, 500.0), (30.0, 30.1))
STEEP = ((1.0, 12.0, 500.0), (30.0, 30.1, 30000.0))


def _engines(
    costs: tuple[tuple[float, ...], tuple[float, ...]], method: str = "oracle", **options: Any
) -> Pair:
    engines = pair(method, speculative={**AUTO, **options})
    freeze_costs(engines, costs)
    return engines


def freeze_costs(engines: Pair, costs: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    """A budget that has learnt nothing, with costs that stay as they are."""
    runner = engines.runner
    proposer = runner.drafter if hasattr(runner, "drafter") else runner.speculator.proposer
    runner.planner.adaptive = AdaptiveBudget(
        _FrozenCosts(*costs), runner.planner.row_budget, proposer.drafter.forward_depth
    )


def _prompts(count: int) -> list[list[int]]:
    return [[6 + i, *PROMPTS[i % len(PROMPTS)]] for i in range(count)]


def check_budget_follows_an_oscillating_load() -> None:
    engines = _engines(STEEP)
    params = greedy(max_tokens=24, ignore_eos=True)
    expected = generate(engines.plain, _prompts(8), params)
    OracleDrafter.sequences = sequences_of(expected)
    nodes, steps = [], []
    for round_ in range(6):
        busy = round_ % 2 == 1
        engines.take_counts()
        prompts = _prompts(8) if busy else _prompts(1)
        actual = generate(engines.tree, prompts, params)
        for i, (a, b) in enumerate(zip(expected, actual, strict=False)):
            assert_same_output(a, b, f"round {round_}, request {i}")
        counts = engines.take_counts()
        nodes.append(counts.nodes / len(prompts))
        steps.append(counts.accepted / len(prompts))
    quiet, busy = nodes[0::2], nodes[1::2]
    # Every time the load falls, trees come back as large as before; every time it rises they go.
    assert min(quiet) > 3 * max(busy), nodes
    assert min(steps[0::2]) >= 4, steps


def check_costs_decide_and_outputs_do_not_depend_on_them() -> None:
    params = [seeded(i, max_tokens=20) if i % 2 else greedy(max_tokens=20) for i in range(6)]
    used = []
    for costs in (FLAT, STEEP):
        engines = _engines(costs)
        _, counts = engines.compare(_prompts(6), params)
        used.append(counts.nodes)
    assert used[0] > 2 * used[1], used


def check_random_drafts_are_given_up() -> None:
    """The head is random: with rows that cost, the engine ends in the plain path."""
    engines = _engines(((1.0, 500.0), (30.0, 2000.0)), "jetspec", ngram_topk=0)
    params = greedy(max_tokens=60, ignore_eos=True)
    expected = generate(engines.plain, _prompts(4), params)
    sent = []
    for _ in range(3):
        engines.take_counts()
        actual = generate(engines.tree, _prompts(4), params)
        for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
            assert_same_output(a, b, f"request {i}")
        sent.append(engines.take_counts().nodes)
    assert sent[-1] < 60, sent


def check_requests_choose_their_own_budget() -> None:
    engines = _engines(FLAT)
    expected = generate(engines.plain, _prompts(3), greedy(max_tokens=24, ignore_eos=True))
    OracleDrafter.sequences = sequences_of(expected)
    runner = engines.runner
    most: dict[str, int] = {}
    draft = runner.planner.draft

    def noted(drafter: Any, requests: Any, batch: Any, **given: Any) -> Any:
        trees = draft(drafter, requests, batch, **given)
        for req_id, tree in zip(requests.req_ids, trees, strict=True):
            most[req_id] = max(most.get(req_id, 0), tree.num_nodes)
        return trees

    runner.planner.draft = noted
    try:
        asked: list[dict[str, Any] | None] = [None, {"specplug_tree_budget": 0},
                                              {"specplug_tree_budget": 2}]  # fmt: skip
        params = [greedy(max_tokens=24, ignore_eos=True, extra_args=extra) for extra in asked]
        actual = generate(engines.tree, _prompts(3), params)
        for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
            assert_same_output(a, b, f"request {i}")
        # Who opted out is never drafted for.
        assert sorted(most.values())[0] == 2 and len(most) == 2 and max(most.values()) > 2, most
        most.clear()
        cut = greedy(max_tokens=24, ignore_eos=True, extra_args={"specplug_max_draft_context": 4})
        assert_same_output(expected[0], generate(engines.tree, _prompts(1), cut)[0], "cut off")
        assert not most
    finally:
        runner.planner.draft = draft
    for extra in ({"specplug_tree_budget": 17}, {"specplug_max_draft_context": -1}):
        name = next(iter(extra))
        with pytest.raises(Exception, match=name):
            generate(engines.tree, _prompts(1), greedy(max_tokens=2, extra_args=extra))


def check_prefix_hits_bring_no_placeholder_rows() -> None:
    engines = pair("oracle", enable_prefix_caching=True, speculative=AUTO)
    runner = engines.runner
    strangers = []
    prepare = runner._prepare_inputs

    def noted(scheduler_output: Any, *args: Any) -> Any:
        for tokens in scheduler_output.scheduled_spec_decode_tokens.values():
            strangers.extend(token for token in tokens if token < 0)
        return prepare(scheduler_output, *args)

    runner._prepare_inputs = noted
    # A prompt of whole blocks and one token more hits everything but its last token.
    prompts = [list(range(6, 6 + 65)), list(range(7, 7 + 65))]
    for _ in range(2):
        engines.compare(prompts, greedy(max_tokens=16, ignore_eos=True))
    params = [greedy(max_tokens=n, ignore_eos=True) for n in (40, 4, 8, 12)]
    engines.compare([prompts[0], *[prompts[1]] * 3], params)
    assert not strangers
