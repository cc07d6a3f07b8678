# SPDX-License-Identifier: Apache-2.0
"""Probabilities converge to what is accepted, per request where requests differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.budget.acceptance import AcceptanceModel

RNG = np.random.default_rng(0)


def _slot(model: AcceptanceModel, name: str) -> int:
    return model.slot_of(name)[0]


def _ask(model: AcceptanceModel, score: float, depth: int, slot: int) -> float:
    return float(model.probabilities(np.array([score]), np.array([depth]), np.array([slot]))[0])


def _teach(
    model: AcceptanceModel, slot: int, share: float, steps: int, score: float = np.log(0.5)
) -> None:
    for _ in range(steps):
        hits = RNG.random(4) < share
        model.observe(np.full(4, score), np.ones(4, int), np.full(4, slot), hits)


@pytest.mark.parametrize("probability", [0.02, 0.3, 0.5, 0.9, 0.99])
def test_a_score_is_taken_at_its_word_at_first(probability: float) -> None:
    model = AcceptanceModel()
    slot = _slot(model, "a")
    assert _ask(model, np.log(probability), 1, slot) == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize("share", [0.1, 0.8])
def test_learns_what_such_nodes_are_worth(share: float) -> None:
    model = AcceptanceModel()
    for name in ("a", "b", "c"):
        _teach(model, _slot(model, name), share, 100)
    # Also for a request it has never seen.
    assert _ask(model, np.log(0.5), 1, _slot(model, "new")) == pytest.approx(share, abs=0.1)


def test_requests_differ_and_new_ones_lie_between() -> None:
    model = AcceptanceModel()
    good, bad = _slot(model, "good"), _slot(model, "bad")
    for _ in range(40):
        _teach(model, good, 0.85, 1)
        _teach(model, bad, 0.15, 1)
    ask = [_ask(model, np.log(0.5), 1, s) for s in (bad, _slot(model, "new"), good)]
    assert ask[0] < 0.35 < ask[1] < 0.65 < ask[2]


def test_a_request_that_changes_is_followed() -> None:
    model = AcceptanceModel()
    slot = _slot(model, "a")
    other = _slot(model, "b")
    for _ in range(100):
        _teach(model, slot, 0.9, 1)
        _teach(model, other, 0.5, 1)
    before = _ask(model, np.log(0.5), 1, slot)
    for _ in range(100):
        _teach(model, slot, 0.1, 1)
        _teach(model, other, 0.5, 1)
    assert _ask(model, np.log(0.5), 1, slot) < before - 0.3


def test_what_was_long_ago_does_not_decide_for_ever() -> None:
    """A day of other texts is forgotten within a thousand steps, for requests not seen before."""
    model = AcceptanceModel()
    for share, requests in ((0.1, 160), (0.8, 20)):
        for number in range(requests):
            _teach(model, _slot(model, str(number)), share, 50)
        model.forget([str(number) for number in range(requests)])
        learnt = _ask(model, np.log(0.5), 1, _slot(model, f"new after {share}"))
        assert learnt < 0.2 if share == 0.1 else learnt > 0.6


def test_a_slot_that_is_used_again_starts_anew() -> None:
    model = AcceptanceModel()
    _slot(model, "b")
    first = _slot(model, "a")
    for _ in range(30):
        _teach(model, first, 1.0, 1)
    model.forget(["a", "unknown"])
    slot, is_new = model.slot_of("c")
    assert slot == first and is_new
    reference = _slot(model, "d")
    assert _ask(model, -0.7, 1, slot) == _ask(model, -0.7, 1, reference)
    assert model.slot_of("c") == (slot, False)


def test_more_requests_than_slots_at_first() -> None:
    model = AcceptanceModel()
    slots = [_slot(model, str(i)) for i in range(200)]
    assert len(set(slots)) == 200
    assert _ask(model, -1.0, 2, slots[-1]) > 0


_NODE = st.tuples(st.floats(-12, 0), st.integers(1, 14), st.booleans())


@given(
    st.lists(st.lists(_NODE, min_size=1, max_size=10), max_size=10),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 3)), min_size=2, max_size=6),
)
def test_no_path_gets_more_probable_by_going_on(
    steps: list[list[tuple[float, int, bool]]], path: list[tuple[float, int]]
) -> None:
    model = AcceptanceModel()
    slot = _slot(model, "a")
    for step in steps:
        scores, depths, accepted = (np.array(column) for column in zip(*step, strict=True))
        model.observe(scores, depths, np.full(len(step), slot), accepted)
    losses, increments = zip(*path, strict=True)
    scores, depths = -np.cumsum(losses), np.cumsum(increments)
    p = model.probabilities(scores, depths, np.full(len(path), slot))
    assert ((p > 0) & (p < 1)).all()
    assert (np.diff(p) <= 1e-12).all()
