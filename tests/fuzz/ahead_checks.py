# SPDX-License-Identifier: Apache-2.0
"""The state machine with a scheduler that works ahead, for every method and with heads that are too
sure."""

from __future__ import annotations

from tests.fuzz.machine_checks import method_checks
from vllm_specplug.registry import method_names

METHODS = method_names()

globals().update(method_checks(*METHODS, *(f"{name}-confident" for name in METHODS), ahead=True))
