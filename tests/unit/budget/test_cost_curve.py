# SPDX-License-Identifier: Apache-2.0
"""A cost curve reproduces what was measured and follows what it sees, slowly where it is odd."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.budget.cost_curve import CostCurve


def _curve() -> CostCurve:
    return CostCurve([1, 8, 32, 64], [30.0, 32.0, 70.0, 120.0])


def test_interpolates_and_extends_by_the_last_slope() -> None:
    curve = _curve()
    assert curve([1, 8, 20, 64, 96]).tolist() == pytest.approx([30, 32, 51, 120, 170])
    assert float(curve(0)) == 30.0
    # A single time counts per row.
    assert CostCurve([4], [8.0])([4, 8, 16]).tolist() == pytest.approx([8, 16, 32])
    # An interrupted measurement does not make rows dear.
    curve = CostCurve([1, 2, 8, 32, 64], [30.0, 31.0, 900.0, 70.0, 120.0])
    assert curve([1, 2, 8, 32, 64]).tolist() == [30, 31, 70, 70, 120]


@pytest.mark.parametrize("factor", [0.5, 1.6, 3.0])
def test_follows_a_lasting_change_everywhere(factor: float) -> None:
    curve, true = _curve(), _curve()
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows = int(rng.integers(1, 64))
        curve.observe(rows, factor * float(true(rows)))
    rows = np.arange(1, 80)
    assert curve(rows) == pytest.approx(factor * true(rows), rel=0.03)


def test_one_interrupted_step_hardly_counts() -> None:
    curve = _curve()
    curve.observe(8, 5000.0)
    assert float(curve(8)) < 1.03 * 32


def test_what_is_seen_again_and_again_at_a_rare_size_is_believed_soon() -> None:
    curve, true = _curve(), _curve()
    for _ in range(100):
        curve.observe(32, float(true(32)))
    for _ in range(10):
        curve.observe(1, 12.0)
        curve.observe(32, float(true(32)))
    assert float(curve(1)) < 20.0
    assert float(curve(32)) == pytest.approx(float(true(32)), rel=0.15)


def test_ages_and_surprises_are_by_size() -> None:
    curve, true = _curve(), _curve()
    for _ in range(10):
        curve.observe(9, float(true(9)))
    assert (curve.age(8), curve.age(32)) == (0, 10)
    assert not curve.is_surprising(8)
    curve.observe(60, 3 * float(true(60)))
    assert curve.is_surprising(64) and not curve.is_surprising(8)
    assert (curve.age(64), curve.age(8)) == (0, 1)
    assert curve.sizes_near(8) == [32.0, 64.0, 1.0] and curve.sizes_near(70) == [64.0]


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.001, 1e5)), min_size=1, max_size=60))
def test_never_falls_and_stays_positive(steps: list[tuple[int, float]]) -> None:
    curve = _curve()
    for rows, milliseconds in steps:
        curve.observe(rows, milliseconds)
    values = curve(np.arange(0, 200))
    assert (values > 0).all() and (np.diff(values) >= 0).all()


def test_what_trees_take_is_told_apart_from_what_rows_take() -> None:
    """Trees of 8 nodes beside 16 requests, a fifth dearer than plain steps of as many rows: plain
    steps, which nobody makes while trees seem to pay, stay as cheap as they were."""
    curve = CostCurve((16, 32), (26.0, 42.0))
    for step in range(400):
        if step % 20:
            curve.observe(24, 1.2 * 34.0, has_trees=True)
        else:
            curve.observe(16, 26.0)
    assert float(curve(16)) == pytest.approx(26.0, rel=0.03)
    assert float(curve(24)) * curve.tree_factor == pytest.approx(1.2 * 34.0, rel=0.03)
    assert curve.tree_factor == pytest.approx(1.2, rel=0.05)
    assert curve.age(16, plain=True) > curve.age(16) == 0


def test_trees_that_seemed_dear_are_tried_again() -> None:
    """While every step is plain, nothing shows what trees take: the old answer fades."""
    curve = CostCurve((16, 32), (26.0, 42.0))
    for _ in range(50):
        curve.observe(16, 26.0)
        curve.observe(24, 1.5 * 34.0, has_trees=True)
    assert curve.tree_factor > 1.3
    for _ in range(1000):
        curve.observe(16, 26.0)
    assert curve.tree_factor < 1.1
