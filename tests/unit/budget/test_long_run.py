# SPDX-License-Identifier: Apache-2.0
"""Minutes of simulated serving: the budget beside plain decoding and every fixed budget."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.unit.budget.simulation import DEPTH, H100, ROWS, Machine, Server
from vllm_specplug.budget.adaptive_budget import AdaptiveBudget
from vllm_specplug.budget.step_cost import StepCostModel
from vllm_specplug.options import RowBudget

MINUTE = 60e3
EXACT = (1.0,) * len(ROWS)
# Small sizes measured while the machine was busy: every tree looks cheaper than it is.
EXPENSIVE_PLAIN = (1.3, 1.2, 1.05, 1.1, 1.2, 1.0, 1.0, 1.0)
# And the other way round.
EXPENSIVE_TREES = (1.0, 1.0, 1.15, 1.4, 1.4, 1.2, 1.0, 1.0)


def auto(machine: Machine, error: tuple[float, ...] = EXACT) -> Server:
    costs = StepCostModel(machine.calibration(error))
    return Server(AdaptiveBudget(costs, RowBudget(64, 4096, 4096, 1), DEPTH), machine)


def steps_ms(machine: Machine) -> float:
    """What as many steps take as the small model makes in a minute."""
    return MINUTE * machine.verify_ms(1) / Machine().verify_ms(1)


@lru_cache
def best_fixed(machine: Machine, load: int) -> tuple[float, float]:
    """Tokens per second of plain decoding, and of the best number of nodes."""
    sizes = (0, 4, 8, 16, 32)
    speeds = [Server(nodes, machine).serve(load, steps_ms(machine)) for nodes in sizes]
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
    ("machine", "load", "error"),
    [*((Machine(), load, EXACT) for load in (1, 4, 16)), (Machine(), 1, EXPENSIVE_PLAIN),
     (Machine(), 16, EXPENSIVE_PLAIN), (Machine(), 4, EXPENSIVE_TREES),
     *((H100, load, (1.0,) * len(H100.rows)) for load in (1, 8, 32))],
)  # fmt: skip
def test_no_fixed_budget_is_much_better(machine: Machine, load: int, error: tuple) -> None:
    plain, best = best_fixed(machine, load)
    ours = auto(machine, error)
    ours.serve(load, steps_ms(machine) / 4)
    reached = ours.serve(load, steps_ms(machine))
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
