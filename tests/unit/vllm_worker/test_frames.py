# SPDX-License-Identifier: Apache-2.0
"""The frames of a wide function's callees share one chunk of memory."""

from __future__ import annotations

from resource import RUSAGE_THREAD, getrusage

import pytest

from vllm_specplug.vllm_worker.frames import with_room_for_callees

CALLS = 500


def callee(value: int) -> int:
    return value


# Larger than a frame of `new_pages`, so that at some depth it does not fit behind one.
callee.__code__ = callee.__code__.replace(co_stacksize=64)


def new_pages(depth: int) -> int:
    """Returns the pages that `CALLS` calls of a function, `depth` frames down, take from the
    operating system."""
    if depth:
        return new_pages(depth - 1)
    before = getrusage(RUSAGE_THREAD).ru_minflt
    for call in range(CALLS):
        callee(call)
    return getrusage(RUSAGE_THREAD).ru_minflt - before


@with_room_for_callees
def new_pages_below(depth: int) -> int:
    return new_pages(depth)


def test_no_depth_makes_calls_take_new_pages() -> None:
    depths = range(300)  # more frames than a chunk of 16 KiB holds
    if max(map(new_pages, depths)) < CALLS:
        pytest.skip("at no depth does this interpreter map memory for each call")
    assert max(map(new_pages_below, depths)) < CALLS / 10


def test_a_wide_method_is_what_it_was() -> None:
    class Base:
        def step(self, first: int, *rest: int, last: int = 3) -> tuple[int, ...]:
            return (first, *rest, last)

    class Wide(Base):
        @with_room_for_callees
        def step(self, first: int, *rest: int, last: int = 4) -> tuple[int, ...]:
            """Doc."""
            return super().step(first, *rest, last=last)

    assert Wide().step(1, 2) == (1, 2, 4)
    assert Wide.step.__doc__ == "Doc."
