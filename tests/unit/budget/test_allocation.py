# SPDX-License-Identifier: Apache-2.0
"""The allocation is the best of all possible ones, on any cost curve."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specplug.budget.allocation import allocate


@st.composite
def _steps(draw: st.DrawFn) -> tuple[np.ndarray, list[int], np.ndarray, np.ndarray, int]:
    """Probabilities, parents, curve, ms by node and requests of a small step."""
    num_requests = draw(st.integers(1, 3))
    probabilities: list[float] = []
    parents: list[int] = []
    node_ms: list[float] = []
    for _ in range(num_requests):
        first = len(parents)
        own_ms = draw(st.sampled_from([0.0, 0.0, 0.3, 2.0]))
        for node in range(draw(st.integers(0, 4))):
            parent = draw(st.integers(-1, node - 1))
            parents.append(-1 if parent < 0 else first + parent)
            above = 1.0 if parent < 0 else probabilities[first + parent]
            # Ties are common on purpose.
            probabilities.append(above * draw(st.sampled_from([1.0, 0.9, 0.5, 0.1, 0.0])))
            node_ms.append(own_ms)
    kind = draw(st.sampled_from(["flat", "stairs", "linear", "any"]))
    rows = np.arange(len(parents) + 1)
    base = draw(st.floats(0.5, 50))
    if kind == "flat":
        curve = np.full(len(rows), base)
    elif kind == "stairs":
        curve = base * (1.0 + (rows + draw(st.integers(0, 3))) // draw(st.integers(1, 4)))
    elif kind == "linear":
        curve = base + draw(st.floats(0.01, 20)) * rows
    else:
        steps = draw(st.lists(st.floats(0, 10), min_size=len(rows), max_size=len(rows)))
        curve = base + np.cumsum(steps)
    return np.array(probabilities), parents, curve, np.array(node_ms), num_requests


def _best_rate(
    probabilities: np.ndarray,
    parents: list[int],
    curve: np.ndarray,
    node_ms: np.ndarray,
    base_tokens: int,
) -> float:
    best = 0.0
    nodes = range(len(parents))
    for size in range(len(parents) + 1):
        for subset in itertools.combinations(nodes, size):
            chosen = set(subset)
            if all(parents[n] < 0 or parents[n] in chosen for n in subset):
                tokens = base_tokens + sum(probabilities[n] for n in subset)
                best = max(best, tokens / (curve[size] + sum(node_ms[n] for n in subset)))
    return best


@settings(max_examples=150, deadline=None)
@given(_steps())
def test_no_subset_closed_under_ancestors_has_a_better_rate(step: tuple) -> None:
    probabilities, parents, curve, node_ms, base_tokens = step
    allocation = allocate(probabilities, curve, base_tokens, node_ms)
    kept = set(np.flatnonzero(allocation.kept).tolist())
    assert all(parents[n] < 0 or parents[n] in kept for n in kept)
    assert allocation.tokens == pytest.approx(base_tokens + probabilities[allocation.kept].sum())
    expected_ms = curve[len(kept)] + node_ms[allocation.kept].sum()
    assert allocation.milliseconds == pytest.approx(expected_ms)
    best = _best_rate(probabilities, parents, curve, node_ms, base_tokens)
    assert allocation.rate == pytest.approx(best, rel=1e-9)
