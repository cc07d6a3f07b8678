# SPDX-License-Identifier: Apache-2.0
"""Any order of requests, aborts, preemptions, prefix hits and budgets leaves outputs as they are.

`SPECPLUG_FUZZ_EXAMPLES=150 pytest tests/fuzz` runs thousands of examples, others each time; the
default, the same few in every run, is what every run affords. Of schedulers that work ahead every
run has the oracle's alone: `make test-full` and `make fuzz` have all methods.
"""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, check_names
from tests.fuzz import (
    ahead_checks,
    hard_head_checks,
    hybrid_ahead_checks,
    hybrid_machine_checks,
    machine_checks,
)
from vllm_specplug.registry import method_names

# All methods run in one process.
TIMEOUT_S = 900 + 40 * machine_checks.EXAMPLES
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S + 60)]


@pytest.mark.xdist_group("machine_checks")
@pytest.mark.parametrize("name", check_names(machine_checks))
def test_state_machine(name: str) -> None:
    assert_check("tests.fuzz.machine_checks", name, TIMEOUT_S)


@pytest.mark.full
@pytest.mark.xdist_group("ahead_checks")
@pytest.mark.parametrize("name", check_names(ahead_checks))
def test_state_machine_ahead(name: str) -> None:
    assert_check("tests.fuzz.ahead_checks", name, TIMEOUT_S)


@pytest.mark.full
@pytest.mark.xdist_group("machine_checks")
@pytest.mark.parametrize("name", check_names(hard_head_checks))
def test_state_machine_with_hard_heads(name: str) -> None:
    assert_check("tests.fuzz.hard_head_checks", name, TIMEOUT_S)


@pytest.mark.xdist_group("hybrid_machine_checks")
@pytest.mark.parametrize("name", check_names(hybrid_machine_checks))
def test_state_machine_of_recurrent_states(name: str) -> None:
    assert_check("tests.fuzz.hybrid_machine_checks", name, TIMEOUT_S)


@pytest.mark.full
@pytest.mark.xdist_group("hybrid_machine_checks")
@pytest.mark.parametrize("name", check_names(hybrid_ahead_checks))
def test_state_machine_of_recurrent_states_ahead(name: str) -> None:
    assert_check("tests.fuzz.hybrid_ahead_checks", name, TIMEOUT_S)


def test_every_method_has_its_machine() -> None:
    assert {f"check_{name}" for name in method_names()} <= set(check_names(machine_checks))
