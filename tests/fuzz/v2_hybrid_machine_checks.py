# SPDX-License-Identifier: Apache-2.0
"""`hybrid_machine` on V2."""

from __future__ import annotations

from tests.e2e.v2_setup import use_v2
from tests.fuzz.hybrid_machine import run_hybrid


def check_recurrent_states() -> None:
    use_v2()
    run_hybrid(False)
