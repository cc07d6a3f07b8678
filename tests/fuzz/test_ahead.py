# SPDX-License-Identifier: Apache-2.0
"""The state machine with a scheduler that works ahead, for every method and with heads that are too
sure."""

from __future__ import annotations

import pytest

from tests.fuzz.examples import TIMEOUT_S, run_method
from vllm_specplug.registry import method_names

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.own_process(timeout_s=TIMEOUT_S),
]
METHODS = [*method_names(), *(f"{name}-confident" for name in method_names())]


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str) -> None:
    run_method(method, ahead=True)
