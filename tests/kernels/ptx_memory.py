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


class SharedMemory:
    """A block's shared memory, NaN at first, and who used each byte since the last barrier.

    Between two barriers the order of warps is open: a warp must not read what another wrote, or
    write anew what another read or wrote. To write what a byte holds already is no harm.
    """

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self._time = 1
        # of the last access, and the warps of that interval as bits
        self._read_at, self._wrote_at = np.zeros((2, size), np.int32)
        self._readers, self._writers = np.zeros((2, size), np.uint32)

    def barrier(self) -> None:
        self._time += 1

    def read(self, index: np.ndarray, warps: np.ndarray) -> None:
        """[n, size] bytes, read by `warps` [n]."""
        for warp in np.unique(warps):
            at, bit = index[warps == warp].reshape(-1), np.uint32(1 << int(warp))
            new = self._wrote_at[at] == self._time
            assert not (new & (self._writers[at] & bit == 0)).any(), (
                "a warp reads what another wrote, without a barrier"
            )
            known = np.where(self._read_at[at] == self._time, self._readers[at], np.uint32(0))
            self._readers[at] = known | bit
            self._read_at[at] = self._time

    def write(self, index: np.ndarray, warps: np.ndarray, data: np.ndarray | None) -> None:
        """[n, size] bytes become `data`; without any, a copy will bring some at any time."""
        for warp in np.unique(warps):
            chosen = warps == warp
            at = index[chosen].reshape(-1)
            changed = data is None or self.bytes[at] != data[chosen].reshape(-1)
            bit = np.uint32(1 << int(warp))
            read = np.where(self._read_at[at] == self._time, self._readers[at], np.uint32(0))
            known = np.where(self._wrote_at[at] == self._time, self._writers[at], np.uint32(0))
            assert not (changed & ((read | known) & ~bit != 0)).any(), (
                "a warp overwrites what another reads or wrote, without a barrier"
            )
            self._writers[at] = known | bit
            self._wrote_at[at] = self._time
            if data is not None:
                self.bytes[at] = data[chosen].reshape(-1)


@dataclass
class Barrier:
    """An mbarrier of one expected arrival per phase."""

    expected: int
    arrivals: int = 0
    bytes_due: int = 0
    phase: int = 0
    # copies that take effect when someone waits
    late: list = field(default_factory=list)

    def settle(self) -> None:
        if self.arrivals == self.expected and self.bytes_due == 0:
            self.phase ^= 1
            self.arrivals = 0
