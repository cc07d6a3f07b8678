# SPDX-License-Identifier: Apache-2.0
"""Memory of the PTX machine, and the objects that live in it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

GLOBAL_BASE = 0x7F00_0000_0000
SHARED_BASE = 1024
PARAM_BASE = 0x0D00_0000


@dataclass
class TensorMap:
    """A copy engine descriptor: up to five dimensions, the first contiguous."""

    address: int
    # elements of two bytes
    extents: tuple[int, ...]
    # elements; the first is 1
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


class GlobalMemory:
    """Device memory as one array of bytes, with gaps of poison between allocations."""

    GAP = 512

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.owned = np.zeros(size, bool)
        self.top = self.GAP

    def put(self, array: np.ndarray) -> int:
        """Copies an array in; returns its address, a multiple of 256."""
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        start = self.top
        assert start + raw.size + self.GAP <= self.bytes.size, "make the memory larger"
        self.bytes[start : start + raw.size] = raw
        self.owned[start : start + raw.size] = True
        self.top = -(-(start + raw.size + self.GAP) // 256) * 256
        return GLOBAL_BASE + start

    def get(self, address: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        start = address - GLOBAL_BASE
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[start : start + count].view(dtype).reshape(shape).copy()


class Order:
    """What each warp knows to have happened: vector clocks.

    A clock is a warp's own, of its small copies, of its matrix products, or of the boxes that one
    mbarrier counts. A warp knows of its own accesses, of copies and products that it has waited
    for, and through a barrier of what those knew that arrived there. What it knows when it fences
    is `fenced`: products and boxes go by another proxy than other accesses, and see of those what
    was known at a fence before. A lane waits for its own copies and fences what it knows itself:
    what of that a single lane may tell is what the warp knew when its lanes met last, `met`.
    """

    BOXES = 64

    def __init__(self, warps: int) -> None:
        self.warps = warps
        clocks = 3 * warps + self.BOXES
        self.known, self.fenced, *met = np.zeros((4, warps, clocks), np.int32)
        self.met = tuple(met)
        # of the next access of each
        self.now = np.ones(clocks, np.int32)
        self._boxes: dict[int, int] = {}
        self._learn_own()

    def copies(self, warp: int) -> int:
        return self.warps + warp

    def products(self, warp: int) -> int:
        return 2 * self.warps + warp

    def boxes(self, barrier: int) -> int:
        """The clock of an mbarrier's address."""
        number = self._boxes.setdefault(barrier, len(self._boxes))
        return 3 * self.warps + number

    def _learn_own(self) -> None:
        own = np.arange(self.warps)
        self.known[own, own] = self.now[own]

    def meet(self, warps) -> None:
        """The lanes of each of these warps meet, at a barrier of the warp or a larger one."""
        for warp in warps:
            self.met[0][warp], self.met[1][warp] = self.known[warp], self.fenced[warp]
        # What lanes do from now on comes after.
        self.now[warps] += 1
        self._learn_own()

    def release(self, warps, *, alone: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """What these know and have fenced, or of it what some lanes alone may tell; what they do
        from now on comes after."""
        warps = np.asarray(warps)
        known, fenced = self.met if alone else (self.known, self.fenced)
        told = known[warps].max(axis=0), fenced[warps].max(axis=0)
        self.now[warps] += 1
        self._learn_own()
        return told

    def learn(self, warps, told: tuple[np.ndarray, np.ndarray], *, every_lane: bool) -> None:
        for warp in warps:
            for known, new in zip((self.known, self.fenced), told, strict=True):
                np.maximum(known[warp], new, out=known[warp])
            if every_lane:
                for known, new in zip(self.met, told, strict=True):
                    np.maximum(known[warp], new, out=known[warp])

    def waited(self, warp: int, clock: int, groups: int, *, together: bool) -> None:
        """The warp has waited for the first `groups` groups of its copies, a lane for its own, or
        of its products, all lanes together."""
        for known in (self.known, self.met[0]) if together else (self.known,):
            known[warp, clock] = max(known[warp, clock], groups)

    def fence(self, warps) -> None:
        for warp in warps:
            np.maximum(self.fenced[warp], self.known[warp], out=self.fenced[warp])


class SharedMemory:
    """A block's shared memory, NaN at first, and which access to a byte was the last.

    A warp must know of the write to what it reads, and of all accesses to what it writes, whatever
    order warps happen to run in. To write what a byte holds already is no harm.
    """

    def __init__(self, size: int, warps: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.order = Order(warps)
        self._writer, self._wrote_at = np.zeros((2, size), np.int32)
        # Written by plain stores or small copies.
        self._plain = np.zeros(size, bool)
        # By warps, and by their products.
        self._read_at = np.zeros((2 * warps, size), np.int32)
        readers = np.arange(warps)
        self._readers = np.concatenate([readers, 2 * warps + readers])

    def read(self, index: np.ndarray, warps: np.ndarray) -> None:
        """[n, size] bytes, read by `warps` [n]."""
        for warp in np.unique(warps):
            at = index[warps == warp].reshape(-1)
            self._check_read(at, int(warp))
            self._read_at[warp, at] = self.order.now[warp]

    def read_by_product(self, index: np.ndarray, warp: int, group: int) -> None:
        """Bytes that product group number `group` of a warp reads until it is waited for."""
        at = index.reshape(-1)
        self._check_read(at, warp)
        self._check_fence(at, warp)
        self._read_at[self.order.warps + warp, at] = group

    def write(self, index: np.ndarray, warps: np.ndarray, data: np.ndarray) -> None:
        """[n, size] bytes become `data`."""
        for warp in np.unique(warps):
            chosen = warps == warp
            at, new = index[chosen].reshape(-1), data[chosen].reshape(-1)
            self._check_write(at[self.bytes[at] != new], int(warp))
            self._written(at, int(warp), self.order.now[warp], plain=True)
            self.bytes[at] = new

    def write_by_copies(self, index: np.ndarray, warps: np.ndarray, group: int) -> None:
        """[n, size] bytes that copy group number `group` of each warp brings until waited for."""
        for warp in np.unique(warps):
            at = index[warps == warp].reshape(-1)
            self._check_write(at, int(warp))
            self._written(at, self.order.copies(int(warp)), group, plain=True)

    def write_by_box(self, index: np.ndarray, warp: int, barrier: int) -> None:
        """Bytes that a box brings until the phase of its mbarrier completes."""
        at, clock = index.reshape(-1), self.order.boxes(barrier)
        self._check_write(at, warp)
        self._check_fence(at, warp)
        self._written(at, clock, self.order.now[clock], plain=False)

    def _written(self, at: np.ndarray, clock: int, time: int, *, plain: bool) -> None:
        self._writer[at], self._wrote_at[at], self._plain[at] = clock, time, plain

    def _check_read(self, at: np.ndarray, warp: int) -> None:
        unknown = self._wrote_at[at] > self.order.known[warp, self._writer[at]]
        if unknown.any():
            writer = self._writer[at][unknown][0]
            if self.order.copies(0) <= writer < self.order.products(0):
                missing = "a warp reads what a copy brings, without a wait and a barrier"
            elif writer >= self.order.warps:
                missing = "a warp reads what a box brings, without a wait for its mbarrier"
            else:
                missing = "a warp reads what another wrote, without a barrier"
            raise AssertionError(missing)

    def _check_fence(self, at: np.ndarray, warp: int) -> None:
        fenced = self.order.fenced[warp, self._writer[at]]
        assert (~self._plain[at] | (self._wrote_at[at] <= fenced)).all(), (
            "a product or a box meets what was written by the other proxy, without a fence"
        )

    def _check_write(self, at: np.ndarray, warp: int) -> None:
        known, writer = self.order.known[warp], self._writer[at]
        read = self._read_at[:, at] > known[self._readers, None]
        assert not read[self.order.warps :].any(), (
            "a warp overwrites what a product reads, without a wait and a barrier"
        )
        unknown = self._wrote_at[at] > known[writer]
        assert not (unknown & (writer >= self.order.warps)).any(), (
            "a warp overwrites what a copy or a box brings, without a wait and a barrier"
        )
        assert not read.any() and not unknown.any(), (
            "a warp overwrites what another reads or wrote, without a barrier"
        )


@dataclass
class Barrier:
    """An mbarrier."""

    expected: int
    order: Order
    # of the boxes that it counts
    clock: int
    # the thread that set it up
    maker: int
    arrivals: int = 0
    bytes_due: int = 0
    phase: int = 0
    # copies that take effect when someone waits
    late: list = field(default_factory=list)
    # what those knew that arrived in this phase, and in the one that completed last
    arriving: list = field(default_factory=list)
    told: tuple[np.ndarray, np.ndarray] | None = None
    # on its maker's warp's clock, when it was fenced
    fenced_at: int | None = None

    def fence(self) -> None:
        """Its maker shows it to the copy engine."""
        if self.fenced_at is None:
            self.fenced_at = int(self.order.now[self.maker // 32])

    def check_fence(self, warp: int) -> None:
        """A warp starts a box that it counts."""
        known = self.order.known[warp, self.maker // 32]
        assert self.fenced_at is not None and self.fenced_at <= known, (
            "a box is counted by an mbarrier whose set-up was not fenced"
        )

    def arrive(self, warp: int, count: int, *, alone: bool) -> None:
        """`alone`: other lanes of the warp do not arrive with it."""
        self.arrivals += count
        assert self.arrivals <= self.expected, "a phase got too many arrivals"
        self.arriving.append(self.order.release([warp], alone=alone))

    def settle(self) -> None:
        if self.arrivals == self.expected and self.bytes_due == 0:
            self.phase ^= 1
            self.arrivals = 0
            known, fenced = (np.max(told, axis=0) for told in zip(*self.arriving, strict=True))
            known[self.clock] = self.order.now[self.clock]
            self.order.now[self.clock] += 1
            self.told, self.arriving = (known, fenced), []
