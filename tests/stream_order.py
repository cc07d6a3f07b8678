# SPDX-License-Identifier: Apache-2.0
"""What a device orders, and what it may reorder: streams, events and the life of memory.

The rules are those of CUDA and of torch's caching allocators, with a vector clock per actor: the
host, and every stream (Fidge, Mattern).

- Work on one stream is done in its order, and after what the host did before it was launched.
- Nothing else is ordered but by an event, which knows what its stream knew when it was recorded:
  a stream that waits for it knows that too, and so does a host that waits or was told that it has
  passed. The host learns of a stream in no other way.
- Two accesses to a byte of which one writes are a race unless the later actor knew of the earlier
  access: some permitted order has them the other way round, whatever order they were run in.
- Memory that torch frees belongs to the stream it was made on. What is made there next may be that
  memory, so that every other stream's access must be known to it by then, or the stream have been
  named by `record_stream`. Pinned memory is held by its allocator until copies of it are done, but
  not for kernels that read it through a mapping.

All threads of the host are one actor: what one of them waited for, all know.
"""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Frames of what only carries an operation out.
_MACHINERY = (
    "/torch/", "/numpy/", "/triton/", "/tests/pretended_", "/tests/stream_order",
    "/tests/device_", "/tests/host_array", "<",
)  # fmt: skip

Clock = dict[int, int]


@dataclass(frozen=True)
class Place:
    """Where the host asked for an access: innermost first."""

    frames: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        short = (f"{'/'.join(file.split('/')[-3:])}:{line}" for file, line in self.frames)
        return " < ".join(short)


def here() -> Place:
    """The place that is being executed."""
    frames: list[tuple[str, int]] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(frames) < 4:
        file = frame.f_code.co_filename
        if not any(part in file for part in _MACHINERY):
            frames.append((file, frame.f_lineno))
        frame = frame.f_back
    return Place(tuple(frames))


@dataclass(eq=False)
class Actor:
    """The host or a stream: its own time, and what it knows of others'."""

    number: int
    clock: Clock = field(default_factory=dict)

    def learn(self, clock: Clock) -> None:
        for number, tick in clock.items():
            if self.clock.get(number, 0) < tick:
                self.clock[number] = tick

    def knows(self, access: Access) -> bool:
        return self.clock.get(access.actor.number, 0) >= access.tick


@dataclass(frozen=True)
class Access:
    """The last one of an actor to a range of bytes of a region."""

    actor: Actor
    tick: int
    writes: bool
    start: int
    end: int
    place: Place

    def __str__(self) -> str:
        who = "the host" if self.actor.number == 0 else f"stream {self.actor.number}"
        verb = "writes" if self.writes else "reads"
        return f"{who} {verb} bytes {self.start} to {self.end} at {self.place}"


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders."""

    kind: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.first}; {self.second}"


@dataclass(eq=False)
class Region:
    """Memory that was allocated in one piece.

    Args:
        kind: "device", or "pinned" for memory of the host that a device can read at any time.
        owner: the stream it was made on; the host for pinned memory.
    """

    kind: str
    owner: Actor
    size: int
    made: Place
    is_mapped: bool = False
    recorded: set[int] = field(default_factory=set)
    # by actor, whether it writes, and range
    accesses: dict[tuple[int, bool, int, int], Access] = field(default_factory=dict)


class StreamOrder:
    """Accesses to memory in the order they are asked for, and the races among them."""

    def __init__(self) -> None:
        self.host = Actor(0)
        self.streams: list[Actor] = []
        self.races: dict[Race, None] = {}
        self.accesses = 0
        # Freed, of streams' memory: accesses of others that its next use has to know of.
        self._freed: dict[int, list[tuple[Access, Place]]] = {}
        # Called when the host has learnt something.
        self.on_learnt: list[Callable[[], None]] = []

    def stream(self) -> Actor:
        """A new one."""
        self.streams.append(Actor(len(self.streams) + 1))
        return self.streams[-1]

    def launch(self, actor: Actor) -> None:
        """The host does something itself, or puts it on a stream: a step of that actor's time,
        after all that the host has done and knows."""
        if actor is not self.host:
            actor.learn(self.host.clock)
        actor.clock[actor.number] = actor.clock.get(actor.number, 0) + 1

    def host_learns(self, clock: Clock) -> None:
        self.host.learn(clock)
        for call in self.on_learnt:
            call()

    def access(self, actor: Actor, region: Region, start: int, end: int, writes: bool) -> None:
        """Within what was last launched on `actor`."""
        if start >= end:
            return
        self.accesses += 1
        made = Access(actor, actor.clock[actor.number], writes, start, end, here())
        for other in region.accesses.values():
            if other.actor is actor or not (writes or other.writes) or actor.knows(other):
                continue
            if other.start < end and start < other.end:
                self._report(f"race in {region.kind} memory made at {region.made}", other, made)
        region.accesses[actor.number, writes, start, end] = made

    def free(self, region: Region) -> None:
        """Its last reference is gone."""
        late = [a for a in region.accesses.values() if not region.owner.knows(a)]
        if region.kind == "device":
            foreign = [
                (a, here())
                for a in late
                if a.actor is not region.owner and a.actor.number not in region.recorded
            ]
            self._freed.setdefault(region.owner.number, []).extend(foreign)
        elif region.is_mapped:
            for access in late:
                self._report("mapped memory freed early", access, f"freed at {here()}")

    def reuse(self, owner: Actor) -> None:
        """Memory is made on a stream: any that was freed there."""
        for access, place in self._freed.pop(owner.number, ()):
            if not owner.knows(access):
                second = f"freed at {place} and allocated again at {here()}"
                self._report("device memory freed early", access, second)

    def _report(self, kind: str, first: Access, second: object) -> None:
        self.races[Race(kind, str(first), str(second))] = None


class Memory:
    """Regions by address; one that is mapped has two."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: dict[int, tuple[Region, int, bool]] = {}

    def add(self, address: int, region: Region, on_device: bool) -> None:
        """
        Args:
            on_device: whether a tensor there is the device's.
        """
        if address not in self._regions:
            insort(self._starts, address)
        self._regions[address] = region, address, on_device

    def remove(self, address: int, region: Region) -> None:
        # Its place may be another's by now.
        if (held := self._regions.get(address)) is not None and held[0] is region:
            del self._regions[address]
            del self._starts[bisect_right(self._starts, address) - 1]

    def find(self, address: int) -> tuple[Region, int, bool] | None:
        """The region at an address, where it starts, and whether it is the device's there; None for
        memory of the host that no device reads."""
        place = bisect_right(self._starts, address)
        if not place:
            return None
        found = self._regions[self._starts[place - 1]]
        return found if address < found[1] + found[0].size else None
