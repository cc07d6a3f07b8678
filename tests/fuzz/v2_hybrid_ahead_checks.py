# SPDX-License-Identifier: Apache-2.0
"""`hybrid_machine` on V2 with a scheduler that works ahead."""

from __future__ import annotations

from tests.e2e.v2_setup import use_v2
from tests.fuzz.hybrid_machine import run_hybrid, wrong_states_are_noticed


def check_recurrent_states() -> None:
    use_v2()
    run_hybrid(True)


def check_wrong_states_are_noticed() -> None:
    use_v2()
    wrong_states_are_noticed(True)
