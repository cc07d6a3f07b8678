# SPDX-License-Identifier: Apache-2.0
"""The state machine on Model Runner V2, with a scheduler that waits for every step and one that
works ahead; see test_state_machine.py."""

from __future__ import annotations

import pytest
from hypothesis import Phase

from tests.e2e.v2_setup import use_v2
from tests.fuzz.engine_machine import machine_pair
from tests.fuzz.machine_checks import run_examples, run_method


def run_v2(method: str, ahead: bool) -> None:
    use_v2()
    run_method(method, ahead)


def check_v2_oracle() -> None:
    run_v2("oracle", ahead=False)


def check_v2_ahead_oracle() -> None:
    run_v2("oracle", ahead=True)


def _is_noticed(ahead: bool, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        run_examples("oracle", ahead, phases=[Phase.generate], report_multiple_bugs=False)


def check_lost_compaction_is_noticed() -> None:
    use_v2()
    for ahead in (False, True):
        backend = machine_pair("oracle", ahead).runner.tree_backend
        backend.compact = lambda *args: None
        try:
            _is_noticed(ahead, match=r"^\('r\d+', \[")
        finally:
            del backend.compact


def check_a_kept_request_is_noticed() -> None:
    """A speculator that forgets nobody drafts as well as any other."""
    use_v2()
    for ahead in (False, True):
        speculator = machine_pair("oracle", ahead).runner.speculator
        forget = speculator.forget
        speculator.forget = lambda *args: None
        try:
            _is_noticed(ahead, match="requests are kept in .*extra_args")
        finally:
            del speculator.forget
            forget(list(speculator.extra_args), list(speculator.extra_args))
