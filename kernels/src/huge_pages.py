# SPDX-License-Identifier: Apache-2.0
"""Memory in pages of 2 MB for tensors that every step reads.

A step of decoding reads all weights in order. In pages of 4 KB what is asked for ahead waits for an
address first: on one core of Zen 4, products with 159 MB of weights take 17 ms in place of 15 with
16 rows, and 10 in place of 8 with eight.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Callable

import torch

_PAGE = 2 << 20
_LINE = 64
# What is mapped at once. Pages that no tensor has reached yet take no memory.
_REGION = 64 << 20


class HugePages:
    """Copies tensors one behind the other into mapped memory that asks for huge pages.

    A region goes when the last tensor in it does. Where the kernel has no huge pages to give, it
    gives others.
    """

    def __init__(self, map_bytes: Callable[[int], torch.Tensor]) -> None:
        self._map_bytes = map_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a tensor, at a cache line's start."""
        size = -(-tensor.nbytes // _LINE) * _LINE
        if len(self._rest) < size:
            self._rest = self._map_bytes(max(size, _REGION))
        held, self._rest = self._rest[:size], self._rest[size:]
        copy = held[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)


def _map_bytes(size: int) -> torch.Tensor:
    """uint8, of at least `size` bytes, from the start of a huge page on."""
    # Shared memory has huge pages of its own setting, which is off by default.
    region = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel may be built without huge pages.
    with contextlib.suppress(OSError):
        region.madvise(mmap.MADV_HUGEPAGE)
    held = torch.frombuffer(region, dtype=torch.uint8)
    first = -held.data_ptr() % _PAGE
    return held[first : first + size]


@functools.cache
def huge_pages() -> HugePages | None:
    """Those of this process; None where the system has none."""
    return HugePages(_map_bytes) if hasattr(mmap, "MADV_HUGEPAGE") else None


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied to huge pages where there are any."""
    pages = huge_pages()
    return tensor if pages is None or tensor.nbytes == 0 else pages.copy(tensor)
