# SPDX-License-Identifier: Apache-2.0
"""`hybrid_machine` with a scheduler that works ahead."""

from __future__ import annotations

from tests.fuzz.hybrid_machine import run_hybrid, wrong_states_are_noticed


def check_recurrent_states() -> None:
    run_hybrid(True)


def check_wrong_states_are_noticed() -> None:
    wrong_states_are_noticed(True)
