# SPDX-License-Identifier: Apache-2.0
"""The state machine on Model Runner V2 for every method that V2 serves, and with heads that are too
sure; one check per method and scheduler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.fuzz.machine_checks import machine_name
from tests.fuzz.v2_machine_checks import run_v2
from vllm_specplug.registry import method_names

METHODS = method_names()


def _checks() -> dict[str, Callable[[], None]]:
    return {
        f"check_{machine_name(name, ahead).replace('-', '_')}": partial(run_v2, name, ahead)
        for name in (*METHODS, *(f"{name}-confident" for name in METHODS))
        for ahead in (False, True)
    }


globals().update(_checks())
