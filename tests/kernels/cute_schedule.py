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
from vllm_specplug.kernels.cute.launch import GridSplit, split_grid


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
    """Trees with these tiles (0: skipped) and row blocks on a device that runs `resident_ctas`
    blocks at once."""

    tiles: Sequence[int]
    row_blocks: Sequence[int]
    heads: int
    resident_ctas: int
    min_tiles: int = MIN_SPLIT_TILES

    @property
    def work(self) -> int:
        """Tiles of all blocks of a head."""
        return sum(t * b for t, b in zip(self.tiles, self.row_blocks, strict=True))

    def grid_split(self, splits: int | None = None, longest: int = 0) -> GridSplit:
        """The split of a launch that knows only the most row blocks and the most tiles, rounded up
        (or `longest`)."""
        blocks = self.heads * max(self.row_blocks)
        bound = longest or 1 << (max(self.tiles) - 1).bit_length()
        least = self.min_tiles
        return split_grid(len(self.tiles), blocks, bound, self.resident_ctas, splits, least)


def up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def tiles_of(context: int, rows: int, *, dense: bool = False, window: int = 0) -> int:
    """Tiles that the rows of a tree attend."""
    tail = up(context, TILE_N) * TILE_N if dense else context
    first = max(0, context - window + 1) // TILE_N if window else 0
    return up(tail + rows, TILE_N) - first if rows else 0


def tiles_per_part(tiles: int, parts: int, min_tiles: int = MIN_SPLIT_TILES) -> int:
    return max(min_tiles, up(tiles, max(1, parts)))


def parts_of(tiles: int, size: int) -> int:
    """Parts of a tree; 0 for one without tiles."""
    return max(min(tiles, 1), up(4 * tiles - size, 4 * size))


def wave_part_tiles(batch: Batch, waves: int) -> int:
    return tiles_per_part(batch.work, waves * batch.resident_ctas // batch.heads, batch.min_tiles)


def estimate_makespan(batch: Batch, size: int) -> int:
    """Estimated time until the last block ends, in tiles."""
    cut_blocks = load = whole_blocks = largest_part = largest_whole = 0
    for tiles, blocks in zip(batch.tiles, batch.row_blocks, strict=True):
        parts = parts_of(tiles, size)
        if parts > 1:
            cut_blocks += blocks * parts
            largest_part = max(largest_part, up(tiles, parts))
            load += blocks * (tiles + CUT_COST * parts)
        else:
            load += blocks * (tiles + WHOLE_COST)
            whole_blocks += blocks
            largest_whole = max(largest_whole, tiles)
    return makespan_of(
        cut_blocks,
        largest_part,
        load,
        whole_blocks,
        largest_whole,
        batch.heads,
        batch.resident_ctas,
    )


def makespan_of(
    cut_blocks: int,
    largest_part: int,
    load: int,
    whole_blocks: int,
    largest_whole: int,
    heads: int,
    resident_ctas: int,
) -> int:
    whole = largest_whole + WHOLE_COST
    parts = up(cut_blocks * heads, resident_ctas) * (largest_part + CUT_COST)
    even = up(load * heads, resident_ctas) + 3 * whole // 4
    return max(parts, min(even, parts + up(whole_blocks * heads, resident_ctas) * whole))


def part_size_of(batch: Batch, split: GridSplit) -> int:
    """Tiles that parts aim at."""
    total = sum(batch.tiles)
    least = tiles_per_part(total, split.slots - len(batch.tiles), batch.min_tiles)
    if split.forced_parts:
        return max(tiles_per_part(total, split.forced_parts, batch.min_tiles), least)
    size = fastest = 0
    for waves in WAVES:
        candidate = max(wave_part_tiles(batch, waves), least)
        time = estimate_makespan(batch, candidate)
        if size == 0 or 17 * time < 16 * fastest:
            size, fastest = candidate, time
    return size


def record_of(batch: Batch, split: GridSplit) -> dict[int, list[int]]:
    """Of each tree with tiles: slot of its first part, and its parts."""
    record: dict[int, list[int]] = {}
    for slot, part in enumerate(slots_of(batch, split)):
        record.setdefault(part.tree, [slot, 0])[1] += 1
    return record


def slots_of(batch: Batch, split: GridSplit) -> list[Part]:
    """What the slots of the grid do, in order; those with nothing to do are left out."""
    if split.slots == len(batch.tiles):
        return [Part(tree, 0, count, False) for tree, count in enumerate(batch.tiles) if count]
    size = part_size_of(batch, split)
    classes: list[list[Part]] = [[], [], [], []]
    for tree, count in enumerate(batch.tiles):
        parts = parts_of(count, size)
        if parts > 1:
            rank = 0
        else:
            rank = 1 if count > size else 2 if 2 * count > size else 3
        for part in range(parts):
            edges = (count * part // parts, count * (part + 1) // parts)
            classes[rank].append(Part(tree, *edges, parts > 1))
    return [part for parts in classes for part in parts]


def makespan(batch: Batch, parts: Sequence[Part]) -> int:
    """Tiles, costs included, of the busiest block slot of the device. Each slot takes the next
    block as soon as it is free."""
    free = [0] * batch.resident_ctas
    for part in parts:
        for _ in range(batch.row_blocks[part.tree] * batch.heads):
            heapq.heapreplace(free, free[0] + part.cost)
    return max(free)


def mean_load(batch: Batch, parts: Sequence[Part]) -> float:
    """Mean tiles, costs included, of a block slot of the device."""
    blocks = (batch.row_blocks[part.tree] * batch.heads * part.cost for part in parts)
    return sum(blocks) / batch.resident_ctas
