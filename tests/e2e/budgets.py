# SPDX-License-Identifier: Apache-2.0
"""Costs of steps that do not follow the clock."""

from __future__ import annotations

from typing import Any

from tests.e2e.pair import Pair
from vllm_specplug.budget.adaptive_budget import AdaptiveBudget
from vllm_specplug.budget.step_cost import Calibration, StepCostModel


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


def freeze_costs(engines: Pair, costs: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    """A budget that has learnt nothing, with costs that stay as they are."""
    runner = engines.runner
    runner.planner.adaptive = AdaptiveBudget(
        _FrozenCosts(*costs), runner.planner.row_budget, runner.drafter.drafter.forward_depth
    )
