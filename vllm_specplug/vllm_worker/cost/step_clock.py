# SPDX-License-Identifier: Apache-2.0
"""Clocks that time the phases of a step without waiting for the device.

A mark is a moment on the clock of the device that computes. A host reads its own clock at once. On
a GPU a mark is an event among the kernels of a stream. The time between two events is known once
the device has passed both, usually one step later, and the clock reads it only then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

Use = Callable[[float], None]

# Maximum number of measurements that wait for the device. More are dropped.
_MAX_PENDING = 64
# On a device, all of the first steps are timed and then one in `_TIMED_EVERY`. The five events of a
# step and their evaluation take the host a quarter of a millisecond.
_FIRST_TIMED, _TIMED_EVERY = 64, 4


class StepClock:
    """Marks moments and tells the time between them: the clock of a host that computes itself."""

    def mark(self) -> Any:
        """Returns this moment; None in a step that is not timed."""
        return time.perf_counter()

    def begin_step(self) -> Any:
        """Returns the moment at which a step begins and the previous one ends."""
        return self.mark()

    def between(self, start: Any, end: Any) -> float:
        """Returns the milliseconds between two marks that the device has passed."""
        return 1e3 * (end - start)

    def measure(self, start: Any, end: Any, use: Use) -> None:
        """Calls `use` with the milliseconds between two marks once they are known: here or in a
        later `poll`, in the order of the calls. It never calls `use` if a mark is None."""
        use(self.between(start, end))

    def poll(self) -> None:
        """Calls `use` for measurements that are known by now. Call it once per step."""


class DeviceClock(StepClock):
    """The clock of a device that runs behind the host.

    Args:
        make_event: returns a new `torch.cuda.Event(enable_timing=True)` on the runner's stream.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._pending: deque[tuple[Any, Any, Use]] = deque()
        self._steps = 0

    @property
    def _is_timed(self) -> bool:
        return self._steps <= _FIRST_TIMED or self._steps % _TIMED_EVERY == 0

    def begin_step(self) -> Any:
        ended = self.mark()
        self._steps += 1
        return ended or self.mark()

    def mark(self) -> Any:
        if not self._is_timed:
            return None
        event = self._make_event()
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        elapsed_ms: float = start.elapsed_time(end)
        return elapsed_ms

    def measure(self, start: Any, end: Any, use: Use) -> None:
        if start is not None and end is not None and len(self._pending) < _MAX_PENDING:
            self._pending.append((start, end, use))

    def poll(self) -> None:
        # Events are passed in their order.
        while self._pending and self._pending[0][1].query():
            start, end, use = self._pending.popleft()
            use(self.between(start, end))
