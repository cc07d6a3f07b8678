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


@dataclass
class Barrier:
    """An mbarrier."""

    expected: int
    arrivals: int = 0
    bytes_due: int = 0
    phase: int = 0
    # copies that take effect when someone waits
    late: list = field(default_factory=list)

    def arrive(self, count: int) -> None:
        self.arrivals += count
        assert self.arrivals <= self.expected, "a phase got too many arrivals"

    def settle(self) -> None:
        if self.arrivals == self.expected and self.bytes_due == 0:
            self.phase ^= 1
            self.arrivals = 0
