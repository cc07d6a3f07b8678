# SPDX-License-Identifier: Apache-2.0
"""Memory in pages of 2 MB for tensors that every step reads.

A decode step reads all weights in order. With pages of 4 KB prefetches wait for address
translation: on one core of Zen 4, products with 159 MB of weights take 17 ms instead of 15 with 16
rows, and 10 instead of 8 with eight.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Callable

import torch

_PAGE = 2 << 20
_LINE = 64
# Size of a mapping. Unused pages take no memory.
_REGION = 64 << 20


class HugePages:
    """Copies tensors one after the other into mapped memory that requests huge pages.

    A region is freed with its last tensor. Without free huge pages the operating system uses small
    ones.
    """

    def __init__(self, map_bytes: Callable[[int], torch.Tensor]) -> None:
        self._map_bytes = map_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy of a tensor, aligned to a cache line."""
        size = -(-tensor.nbytes // _LINE) * _LINE
        if len(self._rest) < size:
            self._rest = self._map_bytes(max(size, _REGION))
        held, self._rest = self._rest[:size], self._rest[size:]
        copy = held[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)


def _map_bytes(size: int) -> torch.Tensor:
    """Returns uint8 memory of at least `size` bytes, aligned to a huge page."""
    # Shared memory has its own setting for huge pages, which is off by default.
    region = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The operating system may not support huge pages.
    with contextlib.suppress(OSError):
        region.madvise(mmap.MADV_HUGEPAGE)
    held = torch.frombuffer(region, dtype=torch.uint8)
    first = -held.data_ptr() % _PAGE
    return held[first : first + size]


@functools.cache
def huge_pages() -> HugePages | None:
    """Returns the huge pages of this process; None if the system has none."""
    return HugePages(_map_bytes) if hasattr(mmap, "MADV_HUGEPAGE") else None


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, copied to huge pages if there are any."""
    pages = huge_pages()
    return tensor if pages is None or tensor.nbytes == 0 else pages.copy(tensor)
