# SPDX-License-Identifier: Apache-2.0
"""Lookups rest where they do not pay, and are tried again."""

from __future__ import annotations

from vllm_specplug.budget.lookup_gate import LookupGate


def _looked_up(gate: LookupGate, steps: int, saved_ms: float, cost_ms: float = 1.0) -> int:
    """In how many of these steps was looked up."""
    count = 0
    for _ in range(steps):
        if not gate.should_skip(8):
            count += 1
            gate.observe(saved_ms, cost_ms)
    return count


def test_rare_finds_pay_together() -> None:
    """One step in eight saves ten times what a lookup takes."""
    gate = LookupGate()
    looked = 0
    for step in range(800):
        if not gate.should_skip(8):
            looked += 1
            gate.observe(10.0 if step % 8 == 0 else 0.0, 1.0)
    assert looked > 300


def test_a_text_that_begins_to_repeat_itself_is_looked_up_at_once() -> None:
    gate = LookupGate()
    _looked_up(gate, 300, saved_ms=0.0)
    while gate.should_skip(8):
        pass
    gate.observe(2.5, 1.0)
    assert _looked_up(gate, 100, saved_ms=2.5) == 100


def test_another_load_has_averages_of_its_own() -> None:
    gate = LookupGate()
    _looked_up(gate, 16, saved_ms=0.0)
    assert gate.should_skip(8) and not gate.should_skip(1)
    gate.observe(4.0, 0.5)
    assert not gate.should_skip(1)
    assert not gate.should_skip(8)
    gate.observe(0.0, 1.0)
    assert gate.should_skip(8)


def test_ranks_that_draft_together_never_skip_lookups() -> None:
    gate = LookupGate()
    gate.is_on = False
    assert _looked_up(gate, 200, saved_ms=0.0) == 200
