# SPDX-License-Identifier: Apache-2.0
"""How long the phases of a step took, without ever waiting for the device.

A mark is a moment on the clock of whatever computes. The host reads its own at once. On a device it
is an event among the kernels of its stream: the time between two of them is known when the device
has passed both, as a rule one step later, and is asked for only then.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Use = Callable[[float], None]

# A device this many spans behind gets no more of them timed until it has caught up.
_MOST_PENDING = 64
# After these steps of a device only every so many-th is timed: its five events and what is learnt
# from them take the host a quarter of a millisecond.
_FIRST_TIMED, _TIMED_EVERY = 64, 4


class StepClock(ABC):
    """Marks moments and tells the time between them."""

    @abstractmethod
    def mark(self) -> Any:
        """This moment; None in a step that is not timed."""

    def begin_step(self) -> Any:
        """The moment at which a step begins and the one before it ends."""
        return self.mark()

    @abstractmethod
    def between(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks that have been passed."""

    @abstractmethod
    def measure(self, start: Any, end: Any, use: Use) -> None:
        """Calls `use` with the milliseconds between two marks as soon as they are known: here, or
        in a later `poll`; in the order of the calls. Never where a mark is None."""

    @abstractmethod
    def poll(self) -> None:
        """Hands out what has become known since. Call once per step."""


class HostClock(StepClock):
    """For computation that the host waits for by itself."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return 1e3 * (end - start)

    def measure(self, start: float, end: float, use: Use) -> None:
        use(self.between(start, end))

    def poll(self) -> None:
        pass


class Event(Protocol):
    """What is needed of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Puts the event behind what was launched so far."""

    def query(self) -> bool:
        """Whether the device has passed it; does not wait."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to a later event; both must have been passed."""


class DeviceClock(StepClock):
    """For a device that the host runs ahead of.

    Args:
        make_event: an event on the stream of the runner.
    """

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._pending: deque[tuple[Event, Event, Use]] = deque()
        self._steps = 0

    @property
    def _is_timed(self) -> bool:
        return self._steps <= _FIRST_TIMED or self._steps % _TIMED_EVERY == 0

    def begin_step(self) -> Event | None:
        ended = self.mark()
        self._steps += 1
        return ended or self.mark()

    def mark(self) -> Event | None:
        if not self._is_timed:
            return None
        event = self._make_event()
        event.record()
        return event

    def between(self, start: Event, end: Event) -> float:
        return start.elapsed_time(end)

    def measure(self, start: Event | None, end: Event | None, use: Use) -> None:
        if start is not None and end is not None and len(self._pending) < _MOST_PENDING:
            self._pending.append((start, end, use))

    def poll(self) -> None:
        # In order of the stream: where one was not passed, no later one was.
        while self._pending and self._pending[0][1].query():
            start, end, use = self._pending.popleft()
            use(self.between(start, end))
