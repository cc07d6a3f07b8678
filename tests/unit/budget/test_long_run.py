# SPDX-License-Identifier: Apache-2.0
"""Minutes of simulated serving: the budget beside plain decoding and every fixed budget."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.unit.budget.simulation import DEPTH, ROWS, Machine, Server
from vllm_specplug.budget import AdaptiveBudget, RowBudget, StepCostModel

MINUTE = 60e3
EXACT = (1.0,) * len(ROWS)
# Small sizes measured while the machine was busy: every tree looks cheaper than it is.
EXPENSIVE_PLAIN = (1.3, 1.2, 1.05, 1.1, 1.2, 1.0, 1.0, 1.0)
# And the other way round.
EXPENSIVE_TREES = (1.0, 1.0, 1.15, 1.4, 1.4, 1.2, 1.0, 1.0)


def auto(machine: Machine, error: tuple[float, ...] = EXACT) -> Server:
    costs = StepCostModel(machine.calibration(error))
    return Server(AdaptiveBudget(costs, RowBudget(64, 4096), DEPTH), machine)


@lru_cache
def best_fixed(load: int) -> tuple[float, float]:
    """Tokens per second of plain decoding, and of the best number of nodes."""
    speeds = [Server(nodes, Machine()).serve(load, MINUTE) for nodes in (0, 4, 8, 16, 32)]
    return speeds[0], max(speeds)


def test_load_that_swings_for_minutes_is_followed_without_collapse() -> None:
    machine = Machine()
    ours, plain = auto(machine, EXPENSIVE_PLAIN), Server(0, machine)
    quiet, busy = [], []
    for _ in range(6):
        for load, ratios in ((1, quiet), (16, busy)):
            ratios.append(ours.serve(load, MINUTE / 4) / plain.serve(load, MINUTE / 4))
    # Three minutes: every phase pays, the last ones as the first.
    assert min(busy) >= 0.98 and sum(busy) > len(busy), busy
    assert min(quiet) >= 1.7, quiet
    assert sum(quiet[3:]) > 0.9 * sum(quiet[:3]), quiet


@pytest.mark.parametrize(
    ("load", "error"),
    [(1, EXACT), (4, EXACT), (16, EXACT), (1, EXPENSIVE_PLAIN), (16, EXPENSIVE_PLAIN),
     (4, EXPENSIVE_TREES)],
)  # fmt: skip
def test_no_fixed_budget_is_much_better(load: int, error: tuple) -> None:
    plain, best = best_fixed(load)
    ours = auto(Machine(), error)
    ours.serve(load, MINUTE / 4)
    reached = ours.serve(load, MINUTE)
    assert reached >= 0.97 * plain
    assert reached >= 0.95 * best, (reached, best)


def test_a_machine_that_becomes_another_is_learnt() -> None:
    """Rows that were nearly free cost their full share from now on, and trees hardly pay. The plain
    step, never chosen before, has become cheaper than it was measured."""
    ours = auto(Machine())
    ours.serve(4, MINUTE / 2)
    steep = Machine(times=[20.0 + 6.0 * rows for rows in ROWS])
    ours.machine = steep
    ours.serve(4, MINUTE / 2)
    plain = Server(0, steep).serve(4, MINUTE / 2)
    assert ours.serve(4, MINUTE / 2) >= 0.97 * plain
