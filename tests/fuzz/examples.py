# SPDX-License-Identifier: Apache-2.0
"""Runs the state machine of `engine_machine`."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz.engine_machine import EngineMachine

# Examples of each method: a few in every run, thousands in all in the long one.
EXAMPLES = int(os.environ.get("SPECPLUG_FUZZ_EXAMPLES", "8"))
STEPS = 30
# All methods of a module run in one process.
TIMEOUT_S = 900 + 40 * EXAMPLES


def run_examples(
    method: str, ahead: bool = False, target: dict[str, Any] | None = None, **changes: Any
) -> Counter[str]:
    """Runs the machine, on another target if one is given; what its examples did."""
    totals: Counter[str] = Counter()
    machine = type(
        f"{method.replace('-', '_')}_machine",
        (EngineMachine,),
        {"method": method, "ahead": ahead, "target": target, "totals": totals},
    )
    chosen: dict[str, Any] = {
        "max_examples": EXAMPLES,
        "stateful_step_count": STEPS,
        "deadline": None,
        "database": None,
        "print_blob": True,
        # The same examples in every run, unless somebody asks for many.
        "derandomize": EXAMPLES < 100,
        "suppress_health_check": list(HealthCheck),
    }
    run_state_machine_as_test(machine, settings=settings(**{**chosen, **changes}))
    return totals


def assert_eventful(totals: Counter[str], ahead: bool) -> None:
    """Fails where the examples were empty."""
    assert totals["verified"] > 0 and totals["accepted"] > 0, totals
    assert totals["preempted"] > 0 and totals["cached"] > 0, totals
    assert totals["aborted"] > 0 or EXAMPLES < 40, totals
    assert (totals["stale"] > 0) == ahead, totals


def run_method(method: str, ahead: bool = False) -> None:
    """Runs the examples of one method; fails where they were empty."""
    totals = run_examples(method, ahead)
    print(dict(totals))
    assert_eventful(totals, ahead)


def assert_noticed(match: str, ahead: bool, target: dict[str, Any] | None = None) -> None:
    """Raises unless examples of the oracle fail with a message like this."""
    with pytest.raises(AssertionError, match=match):
        run_examples("oracle", ahead, target, phases=[Phase.generate], report_multiple_bugs=False)
