# SPDX-License-Identifier: Apache-2.0
"""The CuTe kernel's schedule in plain Python, and what a device would make of it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_specplug.kernels.cute.config import MIN_SPLIT_TILES
from vllm_specplug.kernels.cute.launch import Shares


@dataclass(frozen=True)
class Part:
    """What a slot works on: tiles `begin` to `end` of a tree, counted from its first one."""

    tree: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def share_of(tiles: Sequence[int], shares: Shares) -> int:
    """Tiles that parts aim at, for trees of these tiles (0: skipped)."""
    fair = max(MIN_SPLIT_TILES, -(-sum(tiles) // shares.budget))
    clipped = sum(min(t, fair) for t in tiles)
    usual = -(-5 * clipped // (4 * max(1, sum(t > 0 for t in tiles))))
    least = -(-sum(tiles) // (shares.slots - len(tiles)))
    return max(MIN_SPLIT_TILES, min(fair, usual), least)


def slots_of(tiles: Sequence[int], shares: Shares) -> list[Part]:
    """What the slots of the grid do, in order; those with nothing to do are left out."""
    if shares.slots == len(tiles):
        return [Part(tree, 0, count) for tree, count in enumerate(tiles) if count]
    share = share_of(tiles, shares)
    cut, whole = [], []
    for tree, count in enumerate(tiles):
        parts = max(min(count, 1), (4 * count + 3 * share - 1) // (4 * share))
        for part in range(parts):
            edges = (count * part // parts, count * (part + 1) // parts)
            (cut if parts > 1 else whole).append(Part(tree, *edges))
    return cut + whole


def makespan(parts: Sequence[Part], blocks: int, places: int) -> int:
    """Tiles that the busiest of `places` takes when each slot has `blocks` blocks and a place takes
    the next block as soon as it is free."""
    free = [0] * places
    for part in parts:
        for _ in range(blocks):
            heapq.heapreplace(free, free[0] + part.size)
    return max(free)
