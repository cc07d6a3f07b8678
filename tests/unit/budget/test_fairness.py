# SPDX-License-Identifier: Apache-2.0
"""Requests behind plain decoding count more, and simulated minutes show what that is worth."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.budget.simulation import DEPTH, Machine, Server
from vllm_specplug.budget.adaptive_budget import AdaptiveBudget
from vllm_specplug.budget.fairness import GAIN, FairnessWeights
from vllm_specplug.budget.step_cost import StepCostModel
from vllm_specplug.options import RowBudget

# Rows are dear from the fifth on: a small model on one core without matrix units.
DEAR_ROWS = (26.0, 31.0, 40.0, 60.0, 98.0, 175.0, 330.0, 640.0)


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_who_is_behind_counts_more_until_it_caught_up() -> None:
    both = FairnessWeights()
    for _ in range(20):
        both.step(slots(0, 1), 2, 1.3)
        both.accepted(slots(0, 1), slots(0, 2))
    ahead, behind = both.weights(slots(1, 0), 2)
    assert behind > 2 * ahead and ahead + behind == pytest.approx(2.0)
    both.accepted(slots(0), slots(6))  # 26 tokens were due
    assert both.weights(slots(0, 1), 2).tolist() == pytest.approx([1.0, 1.0])


def test_one_dear_step_is_no_trend() -> None:
    both = FairnessWeights()
    both.step(slots(0, 1), 2, 1.3)
    both.accepted(slots(1), slots(3))
    assert both.weights(slots(0), 1)[0] == 1.0
    assert both.weights(slots(0, 1), 2).max() < 1.3


def test_a_hopeless_request_cannot_forbid_all_drafts() -> None:
    some = FairnessWeights()
    for _ in range(500):
        some.step(slots(0, 1), 2, 2.0)
        some.accepted(slots(1), slots(2))
    ahead, behind = some.weights(slots(1, 0), 2)
    assert behind / ahead == pytest.approx(4.0)


def test_requests_that_may_not_draft_are_protected_as_one() -> None:
    some = FairnessWeights()
    for _ in range(20):
        some.step(slots(0), 3, 1.2)
        some.accepted(slots(0), slots(1))
    assert some.weights(slots(0), 3)[0] < 0.5
    some.step(slots(0), 1, 1.0)  # the two others are gone
    some.step(slots(0), 3, 1.0)
    assert some.weights(slots(0), 3)[0] == 1.0


def test_a_slot_forgets_and_ended_requests_change_none() -> None:
    some = FairnessWeights()
    some.reset(100)
    for _ in range(20):
        some.step(slots(100, -1, 1), 3, 1.5)
        some.accepted(slots(1), slots(1))
    assert some.weights(slots(100, 1), 2)[0] > 1.5
    some.reset(100)
    some.step(slots(100, 1), 2, 1.0)
    assert some.weights(slots(100, 1), 2).tolist() == [1.0, 1.0]


def _served(monkeypatch: pytest.MonkeyPatch, pull: float) -> tuple[float, float]:
    """Throughput over plain decoding, and the pace of the slowest twentieth of the requests."""
    monkeypatch.setattr("vllm_specplug.budget.fairness.GAIN", pull)
    machine = Machine(times=DEAR_ROWS)
    ratios, paces = [], []
    for seed in (0, 1):
        budget = AdaptiveBudget(
            StepCostModel(machine.calibration()), RowBudget(64, 4096, 4096, 1), DEPTH
        )
        server = Server(budget, machine, seed=seed)
        plain = Server(0, machine, seed=seed)
        ratios.append(server.serve(4, 80e3) / plain.serve(4, 80e3))
        plain_ms = machine.verify_ms(4) + machine.rest_ms
        paces.extend(plain_ms * tokens / ms for ms, tokens in server.ended)
    return float(np.mean(ratios)), float(np.percentile(paces, 5))


def test_the_slowest_do_not_pay_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    unweighed, left_behind = _served(monkeypatch, 0.0)
    weighed, slowest = _served(monkeypatch, GAIN)
    assert left_behind < 0.88, "the texts are too alike to show anything"
    assert slowest > 0.91
    assert weighed > unweighed - 0.05 and weighed > 1.0
