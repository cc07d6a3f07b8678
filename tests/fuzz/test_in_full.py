# SPDX-License-Identifier: Apache-2.0
"""The state machine with a scheduler that works ahead, for every method, and with heads that are
too sure or broken; see tests/e2e/hard_heads.py."""

from __future__ import annotations

import pytest

from tests.fuzz.examples import TIMEOUT_S, run_method
from vllm_specplug.registry import method_names

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.own_process(timeout_s=3 * TIMEOUT_S),
]
SURE = [f"{name}-confident" for name in method_names()]
BROKEN = [
    *(f"{name}-broken" for name in ("dels", "tokenswift")),
    *(f"{name}-nan_weights" for name in ("dels", "eagle3_tree", "longspec", "tokenswift")),
]


@pytest.mark.parametrize("method", [*SURE, *BROKEN])
def test_hard_heads(method: str) -> None:
    run_method(method)


@pytest.mark.parametrize("method", [*method_names(), *SURE])
def test_schedulers_that_work_ahead(method: str) -> None:
    run_method(method, ahead=True)
