# SPDX-License-Identifier: Apache-2.0
"""The adaptive budget in a running engine.

Costs are set by the checks and then left alone, so that what is decided does not depend on how
busy the machine is; only acceptance is learnt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.budgets import FLAT, freeze_costs
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Pair, assert_same_output, generate, pair, scheduled, sequences_of
from tests.e2e.requests import PROMPTS, greedy, seeded
from vllm_specplug.vllm_worker.cost.calibration import start_budget

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

AUTO = {"tree_budget": "auto"}
STEEP = ((1.0, 12.0, 500.0), (30.0, 30.1, 30000.0))


def _engines(
    costs: tuple[tuple[float, ...], tuple[float, ...]], method: str = "oracle", **options: Any
) -> Pair:
    engines = pair(method, speculative={**AUTO, **options})
    freeze_costs(engines, costs)
    return engines


def _prompts(count: int) -> list[list[int]]:
    return [[6 + i, *PROMPTS[i % len(PROMPTS)]] for i in range(count)]


def small_trees(
    costs: tuple[tuple[float, ...], tuple[float, ...]],
    method: str = "oracle",
    *,
    ahead: bool,
    ngram_topk: int = 3,
) -> Pair:
    """Engines with six nodes per tree at most."""
    options = {**AUTO, "num_speculative_tokens": 6, "ngram_topk": ngram_topk}
    made = scheduled(ahead, method, speculative=options)
    # Measured at start, or read from what an engine before it measured.
    assert made.runner.planner.adaptive is not None
    freeze_costs(made, costs)
    return made


def _mixed() -> list[Any]:
    return [greedy(max_tokens=24), *(seeded(i, max_tokens=24) for i in range(3))]


@contextmanager
def verified_steps(made: Pair) -> Iterator[list[dict[str, tuple[int, int]]]]:
    """Of each step, the rows of its requests and the nodes of their trees."""
    planner = made.runner.planner
    steps: list[dict[str, tuple[int, int]]] = []
    original = planner.observe

    def noted(requests: Any, req_ids: list[str], *args: Any) -> None:
        found = [(r.end_row - r.root_row, r.tree.num_nodes) for r in requests]
        steps.append(dict(zip(req_ids, found, strict=True)))
        original(requests, req_ids, *args)

    with patch.object(planner, "observe", noted):
        yield steps


def _full_steps(made: Pair) -> list[dict[str, tuple[int, int]]]:
    """Compares four requests; the steps with all of them, but for the first three. Where steps are
    prepared ahead, those are before anything was decided."""
    with verified_steps(made) as steps:
        _, counts = made.compare(PROMPTS, _mixed())
    assert counts.skipping > 3, counts
    return [step for step in steps if len(step) == 4][3:]


def _most_rows(steps: list[dict[str, tuple[int, int]]]) -> int:
    return max(sum(rows for rows, _ in step.values()) for step in steps)


def test_budget_follows_an_oscillating_load() -> None:
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


def test_adaptive_budgets() -> None:
    """Costs allow twelve rows, of 28 that four requests could have."""
    for ahead in (False, True):
        made = small_trees(STEEP, ahead=ahead)
        steps = _full_steps(made)
        speculator = made.runner.speculator
        assert (speculator.reserved is not None) == ahead
        # The next step drops what ended.
        generate(made.tree, PROMPTS[:1], greedy(max_tokens=2))
        assert len(speculator.trees) == 1
        assert not ahead or len(speculator.reserved.by_request) == 1
        nodes = [tuple(nodes for _, nodes in step.values()) for step in steps]
        assert any(len(set(of_requests)) > 1 for of_requests in nodes), nodes
        assert len(set(nodes)) > 2, nodes
        assert 4 < _most_rows(steps) <= 12, steps


def test_it_would_notice_rows_that_stay_reserved() -> None:
    with patch("vllm_specplug.engine.step_reports.keep_reserved_rows", lambda *args: None):
        assert _most_rows(_full_steps(small_trees(STEEP, ahead=True))) == 28


def test_adaptive_budgets_of_a_head() -> None:
    for ahead in (False, True):
        made = small_trees(FLAT, "jetspec", ahead=ahead)
        with verified_steps(made) as steps:
            made.compare(PROMPTS, _mixed())
        nodes = {tuple(nodes for _, nodes in step.values()) for step in steps}
        assert len(nodes) > 2, steps


def test_random_drafts_are_given_up() -> None:
    """With rows that cost, engines end in the plain path: a scheduler that works ahead reserves no
    rows either."""
    params = greedy(max_tokens=60, ignore_eos=True)
    for ahead in (False, True):
        made = small_trees(((1.0, 500.0), (30.0, 2000.0)), "jetspec", ahead=ahead, ngram_topk=0)
        expected = generate(made.plain, PROMPTS, params)
        for _ in range(2):
            with verified_steps(made) as steps:
                actual = generate(made.tree, PROMPTS, params)
            for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
                assert_same_output(a, b, f"request {i}")
        rows = [sum(rows for rows, _ in step.values()) for step in steps if len(step) == 4]
        assert len(rows) > 40 and sum(rows[5:]) < 4.5 * len(rows), rows


def test_requests_that_fix_their_budget_among_adaptive_ones() -> None:
    for ahead in (False, True):
        made = small_trees(STEEP, ahead=ahead)
        params = [
            greedy(max_tokens=20, extra_args={"specplug_tree_budget": budget})
            for budget in (0, 2, 5, "auto")
        ]
        with verified_steps(made) as steps:
            made.compare(PROMPTS, params)
        full = [step for step in steps if len(step) == 4][3:]
        most = {name: max(step[name][1] for step in full) for name in full[0]}
        assert sorted(most.values())[0] == 0 and {2, 5} <= set(most.values()), full


def test_step_costs_are_measured_and_learnt() -> None:
    for ahead in (False, True):
        made = small_trees(FLAT, ahead=ahead)
        planner = made.runner.planner
        start_budget(planner, made.runner.state)
        with patch.object(planner.adaptive.costs, "observe_verify") as observe:
            generate(made.tree, PROMPTS, greedy(max_tokens=12, ignore_eos=True))
        # Steps of only decoding rows: rows, logits, tokens that roots attended, milliseconds, and
        # tokens that nodes attended.
        assert observe.call_count >= 3
        for (rows, sampled, context, milliseconds, more_context), _ in observe.call_args_list:
            assert 1 <= rows == sampled <= 28 and 0 < milliseconds < 1e4
            assert context > 0 and context + more_context > rows * 4


def test_prefix_hits_bring_no_placeholder_rows() -> None:
    """vLLM would pad them with drafts that nobody proposed."""
    engines = pair("oracle", enable_prefix_caching=True, speculative=AUTO)
    # A prompt of whole blocks and one token more hits everything but its last token.
    prompts = [list(range(6, 6 + 65)), list(range(7, 7 + 65))]
    with verified_steps(engines) as steps:
        for _ in range(2):
            engines.compare(prompts, greedy(max_tokens=16, ignore_eos=True))
        params = [greedy(max_tokens=n, ignore_eos=True) for n in (40, 4, 8, 12)]
        engines.compare([prompts[0], *[prompts[1]] * 3], params)
    assert all(rows == 1 + nodes for step in steps for rows, nodes in step.values()), steps
