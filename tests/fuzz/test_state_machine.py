# SPDX-License-Identifier: Apache-2.0
"""Any order of requests, aborts, preemptions, prefix hits and budgets leaves outputs as they are.

`SPECPLUG_FUZZ_EXAMPLES=150 pytest tests/fuzz` runs a thousand examples, others each time; the
default, the same few in every run, is what every run affords.
"""

from __future__ import annotations

import pytest

from tests.e2e.pair import assert_check, check_names
from tests.fuzz import hard_head_checks, machine_checks
from vllm_specplug.registry import method_names

# All methods run in one process.
TIMEOUT_S = 900 + 40 * machine_checks.EXAMPLES
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.xdist_group("machine_checks"),
    pytest.mark.timeout(TIMEOUT_S + 60),
]


@pytest.mark.parametrize("name", check_names(machine_checks))
def test_state_machine(name: str) -> None:
    assert_check("tests.fuzz.machine_checks", name, TIMEOUT_S)


@pytest.mark.full
@pytest.mark.parametrize("name", check_names(hard_head_checks))
def test_state_machine_with_hard_heads(name: str) -> None:
    assert_check("tests.fuzz.hard_head_checks", name, TIMEOUT_S)


def test_every_method_has_its_machine() -> None:
    assert {f"check_{name}" for name in method_names()} <= set(check_names(machine_checks))
    confident = {f"check_confident_{name}" for name in method_names()}
    assert confident <= set(check_names(hard_head_checks))
