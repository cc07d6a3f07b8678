# SPDX-License-Identifier: Apache-2.0
"""The schedule of the attention kernels in plain Python, and what a device would make of it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_specplug.kernels.cute.config import (
    CUT_COST,
    MIN_SPLIT_TILES,
    TILE_N,
    WAVES,
    WHOLE_COST,
)
from vllm_specplug.kernels.cute.launch import Shares, share_out


@dataclass(frozen=True)
class Part:
    """What a slot works on: tiles `begin` to `end` of a tree, counted from its first one."""

    tree: int
    begin: int
    end: int
    cut: bool
    """Whether it is not the whole tree."""

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def cost(self) -> int:
        """What one of its blocks takes, in tiles."""
        return self.size + (CUT_COST if self.cut else WHOLE_COST)


@dataclass(frozen=True)
class Batch:
    """Trees of these tiles (0: skipped) and row blocks on a device that runs `places` blocks."""

    tiles: Sequence[int]
    row_blocks: Sequence[int]
    heads: int
    places: int
    least_tiles: int = MIN_SPLIT_TILES

    @property
    def work(self) -> int:
        """Tiles of all blocks of a head."""
        return sum(t * b for t, b in zip(self.tiles, self.row_blocks, strict=True))

    def shares(self, splits: int | None = None, longest: int = 0) -> Shares:
        """Of a launch that knows no more than the most row blocks and the most tiles, rounded up
        (or `longest`)."""
        blocks = self.heads * max(self.row_blocks)
        bound = longest or 1 << (max(self.tiles) - 1).bit_length()
        least = self.least_tiles
        return share_out(len(self.tiles), blocks, bound, self.places, splits, least)


def up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def tiles_of(context: int, rows: int, *, dense: bool = False, window: int = 0) -> int:
    """Tiles that the rows of a tree attend."""
    tail = up(context, TILE_N) * TILE_N if dense else context
    first = max(0, context - window + 1) // TILE_N if window else 0
    return up(tail + rows, TILE_N) - first if rows else 0


def divided(tiles: int, parts: int, least_tiles: int = MIN_SPLIT_TILES) -> int:
    return max(least_tiles, up(tiles, max(1, parts)))


def parts_of(tiles: int, share: int) -> int:
    """Parts of a tree; 0 for one without tiles."""
    return max(min(tiles, 1), up(4 * tiles - share, 4 * share))


def wave_share(batch: Batch, waves: int) -> int:
    return divided(batch.work, waves * batch.places // batch.heads, batch.least_tiles)


def estimate(batch: Batch, share: int) -> int:
    """Tiles until the last place is done, about."""
    cut_blocks = load = whole_blocks = largest_part = largest_whole = 0
    for tiles, blocks in zip(batch.tiles, batch.row_blocks, strict=True):
        parts = parts_of(tiles, share)
        if parts > 1:
            cut_blocks += blocks * parts
            largest_part = max(largest_part, up(tiles, parts))
            load += blocks * (tiles + CUT_COST * parts)
        else:
            load += blocks * (tiles + WHOLE_COST)
            whole_blocks += blocks
            largest_whole = max(largest_whole, tiles)
    return estimate_of(
        cut_blocks, largest_part, load, whole_blocks, largest_whole, batch.heads, batch.places
    )


def estimate_of(
    cut_blocks: int,
    largest_part: int,
    load: int,
    whole_blocks: int,
    largest_whole: int,
    heads: int,
    places: int,
) -> int:
    whole = largest_whole + WHOLE_COST
    parts = up(cut_blocks * heads, places) * (largest_part + CUT_COST)
    even = up(load * heads, places) + 3 * whole // 4
    return max(parts, min(even, parts + up(whole_blocks * heads, places) * whole))


def share_of(batch: Batch, shares: Shares) -> int:
    """Tiles that parts aim at."""
    total = sum(batch.tiles)
    least = divided(total, shares.slots - len(batch.tiles), batch.least_tiles)
    if shares.forced:
        return max(divided(total, shares.forced, batch.least_tiles), least)
    size = fastest = 0
    for waves in WAVES:
        share = max(wave_share(batch, waves), least)
        time = estimate(batch, share)
        if size == 0 or 17 * time < 16 * fastest:
            size, fastest = share, time
    return size


def record_of(batch: Batch, shares: Shares) -> dict[int, list[int]]:
    """Of each tree with tiles: slot of its first part, and its parts."""
    record: dict[int, list[int]] = {}
    for slot, part in enumerate(slots_of(batch, shares)):
        record.setdefault(part.tree, [slot, 0])[1] += 1
    return record


def slots_of(batch: Batch, shares: Shares) -> list[Part]:
    """What the slots of the grid do, in order; those with nothing to do are left out."""
    if shares.slots == len(batch.tiles):
        return [Part(tree, 0, count, False) for tree, count in enumerate(batch.tiles) if count]
    share = share_of(batch, shares)
    classes: list[list[Part]] = [[], [], [], []]
    for tree, count in enumerate(batch.tiles):
        parts = parts_of(count, share)
        if parts > 1:
            place = 0
        else:
            place = 1 if count > share else 2 if 2 * count > share else 3
        for part in range(parts):
            edges = (count * part // parts, count * (part + 1) // parts)
            classes[place].append(Part(tree, *edges, parts > 1))
    return [part for parts in classes for part in parts]


def makespan(batch: Batch, parts: Sequence[Part]) -> int:
    """Tiles, costs included, that the busiest place takes where each takes the next block as soon
    as it is free."""
    free = [0] * batch.places
    for part in parts:
        for _ in range(batch.row_blocks[part.tree] * batch.heads):
            heapq.heapreplace(free, free[0] + part.cost)
    return max(free)


def mean_load(batch: Batch, parts: Sequence[Part]) -> float:
    """Tiles, costs included, that a place takes on average."""
    blocks = (batch.row_blocks[part.tree] * batch.heads * part.cost for part in parts)
    return sum(blocks) / batch.places
