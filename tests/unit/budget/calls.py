# SPDX-License-Identifier: Apache-2.0
"""How much work a decision is, counted instead of timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def count_calls(work: Callable[[], object]) -> int:
    """Functions that `work` calls, Python's and built-in ones."""
    calls = 0

    def noted(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(noted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls
