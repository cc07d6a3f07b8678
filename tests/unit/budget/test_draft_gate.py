# SPDX-License-Identifier: Apache-2.0
"""A draft forward is run where it pays, and tried again at little cost where it did not."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specplug.budget.cost_curve import CostCurve
from vllm_specplug.budget.draft_gate import PROBE_SHARE, DraftGate

DEEPEST = 4
NONE = (np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))
FLAT_MS = np.full(200, 30.0)
STEEP_MS = 30.0 + 5.0 * np.arange(200)


def _decide(
    gate: DraftGate,
    num_reqs: int = 4,
    *,
    step_ms: np.ndarray = FLAT_MS,
    draft_ms: float = 0.2,
    found: tuple[np.ndarray, np.ndarray] = (np.empty(0), np.empty(0, np.int64)),
    limits: list[int] | None = None,
    pending_ms: list[float] | None = None,
) -> np.ndarray:
    draft = CostCurve([1, 100], [draft_ms, 100 * draft_ms])
    return gate.decide(
        np.arange(num_reqs),
        np.array(limits or [DEEPEST] * num_reqs),
        found[0],
        found[1],
        num_reqs,
        lambda requests, depth: draft(requests * (np.asarray(depth) + 1)),
        step_ms,
        pending_ms=None if pending_ms is None else np.array(pending_ms),
    ).depths


def _observe(gate: DraftGate, depths: np.ndarray, probability: float) -> None:
    """Every forward finds a chain of nodes, each accepted with `probability` after its parent."""
    slots = np.flatnonzero(depths)
    if not len(slots):
        return
    reached = depths[slots]
    owners = np.repeat(np.arange(len(slots)), reached)
    levels = np.concatenate([np.arange(1, d + 1) for d in reached])
    gate.observe(slots, reached, (probability**levels, levels, owners), NONE)


def test_stops_after_the_drafter_proved_useless_and_starts_again_when_it_is_not() -> None:
    gate = DraftGate(DEEPEST)
    probes = drafted = 0
    for _ in range(400):
        depths = _decide(gate, draft_ms=0.5)
        drafted += int((depths > 0).sum())
        if depths.any():
            _observe(gate, depths, 0.02)
    # Some at first, single probes later.
    late = [_decide(gate, draft_ms=0.5) for _ in range(200)]
    probes = [depths for depths in late if depths.any()]
    assert all((depths > 0).sum() == 1 for depths in probes)
    assert 0 < len(probes) < 40
    for _ in range(3000):
        depths = _decide(gate, draft_ms=0.5)
        if depths.any():
            _observe(gate, depths, 0.9)
        if (depths > 0).sum() == 4:
            break
    else:
        pytest.fail("never drafted for all again")


def test_what_lies_below_the_wanted_depth_is_seen_now_and_then() -> None:
    """Deep nodes are taken to be poor until one was drafted."""
    gate, shares = DraftGate(DEEPEST), []
    # A level costs 1 ms, and what is taken to lie below the second one is not worth that.
    ms = np.array([10.0] * 9 + [1e9])
    for _ in range(2000):
        depths = _decide(gate, 1, step_ms=ms, draft_ms=1.0)
        shares.append(depths[0] == DEEPEST)
        _observe(gate, depths, 0.5)
    assert 0.005 < np.mean(shares[1000:]) < 0.1
    for _ in range(2000):
        depths = _decide(gate, 1, step_ms=ms, draft_ms=1.0)
        shares.append(depths[0] == DEEPEST)
        _observe(gate, depths, 0.99)
    assert np.mean(shares[-500:]) > 0.9


def test_prefers_the_requests_whose_drafts_were_good() -> None:
    gate = DraftGate(DEEPEST)
    for _ in range(60):
        for slot, probability in enumerate((0.9, 0.9, 0.05, 0.05)):
            depths = np.zeros(4, np.int64)
            depths[slot] = DEEPEST
            _observe(gate, depths, probability)
    depths = _decide(gate, draft_ms=0.6, step_ms=STEEP_MS[:60])
    assert (depths[:2] > 0).all() and not depths[2:].any()


def test_what_lookups_found_needs_no_forward() -> None:
    found = (np.full(8, 0.97), np.repeat(np.arange(4), 2))

    def taught() -> DraftGate:
        gate = DraftGate(DEEPEST)
        levels = np.arange(1, DEEPEST + 1)
        owners = np.zeros(DEEPEST, np.int64)
        for _ in range(300):
            nodes = (0.7**levels, levels, owners)
            # Where lookups have found something, a forward adds nothing to it.
            gate.observe(np.array([0]), np.array([DEEPEST]), nodes, NONE)
            gate.observe(np.array([0]), np.array([DEEPEST]), nodes, nodes)
        return gate

    assert _decide(taught(), draft_ms=0.5).any()
    assert not _decide(taught(), draft_ms=0.5, found=found).any()


def test_does_not_flap_between_nearly_equal_choices() -> None:
    """Costs that oscillate around the threshold by less than the hysteresis switch it once."""

    def gain_at(draft_ms: float) -> bool:
        return bool(_decide(DraftGate(DEEPEST), draft_ms=draft_ms).any())

    low, high = 0.2, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if gain_at(middle) else (low, middle)
    gate = DraftGate(DEEPEST)
    states = []
    for step in range(200):
        depths = _decide(gate, draft_ms=low * (1.005 if step % 2 else 0.999))
        states.append(int((depths > 0).sum()) > 1)
    switches = sum(a != b for a, b in zip(states, states[1:], strict=False))
    assert switches <= 2


# -- requests that a first draft costs more ------------------------------------------------------


def _closed() -> DraftGate:
    """A gate that has learnt that drafts bring nothing."""
    gate = DraftGate(DEEPEST)
    for _ in range(300):
        _observe(gate, _decide(gate, draft_ms=0.5), 0.02)
    assert not gate.is_on
    return gate


def test_a_debt_is_taken_on_once_as_much_was_lost_by_waiting() -> None:
    """A debt of seven steps' time is taken on at once where drafts gain much, and where they gain
    little, later."""
    waited = {}
    for probability in (0.1, 0.9):
        gate = DraftGate(DEEPEST)
        for _ in range(100):
            _observe(gate, np.full(4, DEEPEST), probability)
        gate.is_on = False
        assert (_decide(gate, draft_ms=0.1) > 0).all(), "without debts they are drafted for"
        gate.is_on = False
        steps = 0
        while not (_decide(gate, draft_ms=0.1, pending_ms=[50.0] * 4) > 0).all():
            steps += 1
        waited[probability] = steps
    assert waited[0.9] == 0
    assert 10 < waited[0.1] < 1000, waited


def test_probes_take_turns_and_leave_those_alone_that_owe_more_than_a_probe() -> None:
    gate = _closed()
    seen = set()
    for _ in range(3000):
        depths = _decide(gate, draft_ms=0.5, pending_ms=[30.0, 1.0, 30.0, 0.0])
        seen |= set(np.flatnonzero(depths).tolist())
        _observe(gate, depths, 0.02)
    assert seen == {1, 3}


def test_where_all_owe_the_cheapest_is_probed_and_its_debt_is_part_of_the_share() -> None:
    gate = _closed()
    debts = [40.0, 25.0, 60.0, 50.0]
    spent, steps, paid = 0.0, 8000, set()
    for step in range(steps):
        # In a service requests end, and those that take their place have debts of their own.
        owed = [debt * (i not in paid) for i, debt in enumerate(debts)]
        depths = _decide(gate, draft_ms=0.5, pending_ms=owed)
        for i in np.flatnonzero(depths).tolist():
            assert not paid or i in paid, "who has paid is probed first"
            spent += owed[i] + 0.5 * (DEEPEST + 1)
            paid.add(i)
        if step % 1000 == 999:
            paid.clear()
        _observe(gate, depths, 0.02)
    assert 0 < spent / (30.0 * steps) < 2 * PROBE_SHARE


def test_of_equals_those_are_drafted_for_that_owe_least() -> None:
    gate = DraftGate(DEEPEST)
    for _ in range(100):
        _observe(gate, np.full(4, DEEPEST), 0.9)
    # There are rows for three nodes, and one request has as many.
    depths = _decide(gate, draft_ms=1.0, step_ms=FLAT_MS[:4], pending_ms=[9.0, 9.0, 0.0, 9.0])
    assert np.flatnonzero(depths).tolist() == [2]
