# SPDX-License-Identifier: Apache-2.0
"""Memory of the interpreter's frames.

CPython keeps frames in chunks of memory. Where a function's frame is the last that fits into a
chunk, each of its calls maps a new chunk and unmaps it on return, which takes longer than most of
the calls themselves. The function that a compiled model became makes hundreds of calls per step,
and its place in a chunk depends on the frames above it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# Places of 8 bytes. A chunk is the next power of two, here 256 KiB: the upper half is left for the
# callees. Pages that no frame uses are not backed by memory.
_PLACES = 1 << 14


def with_room_for_callees(function: F) -> F:
    """Returns the function, whose frame now gets a chunk with 128 KiB of room for its callees'
    frames."""
    code = function.__code__
    wide = code.replace(co_stacksize=code.co_stacksize + _PLACES)
    function.__code__ = wide
    return function
