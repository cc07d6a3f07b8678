# SPDX-License-Identifier: Apache-2.0
"""Memory of the interpreter's frames.

CPython keeps frames in chunks of memory. If a function's frame is the last that fits into a chunk,
CPython maps a new chunk for each of its calls and unmaps it on return, which takes longer than most
calls. The Python code of a compiled model makes hundreds of calls per step, and the frames above it
decide where its own frame lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# Places of 8 bytes. The size of a chunk is the next power of two, here 256 KiB, of which nearly
# half is left for the callees. Pages that no frame uses are not backed by memory.
_PLACES = 1 << 14


def with_room_for_callees(function: F) -> F:
    """Returns the function, changed so that its frame's chunk has more than 100 KiB for the frames
    of its callees."""
    code = function.__code__
    wide = code.replace(co_stacksize=code.co_stacksize + _PLACES)
    function.__code__ = wide
    return function
