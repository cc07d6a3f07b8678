# SPDX-License-Identifier: Apache-2.0
"""Computes the tree and the part of each program of a split launch.

This is the schedule of `cute.tile_scheduler` in Triton: the grid has a slot per tree and slots for
parts, and every program computes the work of its slot from the lengths on the device. Scheduler
tiles have TILE columns for every BLOCK_N. The tree's columns begin at a tile boundary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cute import config

TILE = tl.constexpr(config.TILE_N)
MIN_TILES = 4
"""Tiles of the shortest part: a shorter one costs more in merging than it saves."""
_MIN_TILES = tl.constexpr(MIN_TILES)
# Trees that are processed in parallel.
_LANES = tl.constexpr(128)
_WAVES = tl.constexpr(len(config.WAVES))
assert tuple(range(len(config.WAVES), 0, -1)) == config.WAVES, "waves are counted down to one"
_WHOLE_COST = tl.constexpr(config.WHOLE_COST)
_CUT_COST = tl.constexpr(config.CUT_COST)
# Two counts are packed in one number, the second in units of this.
_HIGH = tl.constexpr(1 << 16)


@triton.jit
def context_tiles(context, WINDOW: tl.constexpr):
    """Returns the first column of a tree's tiles, and the context tiles from there."""
    if WINDOW:
        # The root attends the earliest position. Earlier pages may belong to another request.
        origin = tl.minimum(tl.maximum(context - WINDOW + 1, 0) // TILE * TILE, context)
    else:
        origin = context * 0
    return origin, tl.cdiv(context - origin, TILE)


@triton.jit
def _trees(plan, plan_stride, num_trees, base, WINDOW: tl.constexpr):
    """Returns tiles and rows of _LANES trees; 0 for skipped trees and after the last."""
    tree = base + tl.arange(0, _LANES)
    present = tree < num_trees
    rows = tl.load(plan + 2 * plan_stride + tree, mask=present, other=0)
    context = tl.load(plan + 3 * plan_stride + tree, mask=present & (rows > 0), other=0)
    _, tiles = context_tiles(context, WINDOW)
    return tl.where(rows > 0, tiles + tl.cdiv(rows, TILE), 0), rows


@triton.jit
def _parts(tiles, size):
    """Returns the parts of a tree, each of at most 5/4 `size` tiles; 0 for a tree without tiles."""
    return tl.maximum((4 * tiles + 3 * size - 1) // (4 * size), tl.minimum(tiles, 1))


@triton.jit
def _tiles_per_part(tiles, parts):
    return tl.maximum(tl.cdiv(tiles, tl.maximum(parts, 1)), _MIN_TILES)


@triton.jit
def _part_size(
    plan, plan_stride, num_trees, forced_parts, resident_ctas, extra, num_heads,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Returns the target part size in tiles, for `num_heads` KV heads and `extra` part slots."""
    all_tiles = tl.zeros([_LANES], tl.int32)
    all_work = tl.zeros([_LANES], tl.int32)
    for base in range(0, num_trees, _LANES):
        tiles, rows = _trees(plan, plan_stride, num_trees, base, WINDOW)
        all_tiles += tiles
        all_work += tiles * tl.cdiv(rows * GROUP, BLOCK_M)
    total = tl.sum(all_tiles, 0)
    # The parts must fit the slots for all lengths.
    least = _tiles_per_part(total, extra)
    size = tl.maximum(_tiles_per_part(total, forced_parts), least)
    if forced_parts == 0:
        option = tl.arange(0, _WAVES)
        waves = (_WAVES - option) * resident_ctas // num_heads
        sizes = tl.maximum(_tiles_per_part(tl.sum(all_work, 0), waves), least)
        cut_blocks = tl.zeros([_WAVES, _LANES], tl.int32)
        largest_part = tl.zeros([_WAVES, _LANES], tl.int32)
        load = tl.zeros([_WAVES, _LANES], tl.int32)
        whole_blocks = tl.zeros([_WAVES, _LANES], tl.int32)
        largest_whole = tl.zeros([_WAVES, _LANES], tl.int32)
        for base in range(0, num_trees, _LANES):
            tiles, rows = _trees(plan, plan_stride, num_trees, base, WINDOW)
            blocks = tl.cdiv(rows * GROUP, BLOCK_M)[None, :]
            parts = _parts(tiles[None, :], sizes[:, None])
            cut = parts > 1
            largest = tl.cdiv(tiles[None, :], tl.maximum(parts, 1))
            cut_blocks += tl.where(cut, blocks * parts, 0)
            largest_part = tl.maximum(largest_part, tl.where(cut, largest, 0))
            load += blocks * (tiles[None, :] + tl.where(cut, _CUT_COST * parts, _WHOLE_COST))
            whole_blocks += tl.where(cut, 0, blocks)
            largest_whole = tl.maximum(largest_whole, tl.where(cut, 0, tiles[None, :]))
        of_parts = tl.cdiv(tl.sum(cut_blocks, 1) * num_heads, resident_ctas)
        of_parts *= tl.max(largest_part, 1) + _CUT_COST
        even = tl.cdiv(tl.sum(load, 1) * num_heads, resident_ctas)
        of_whole = tl.max(largest_whole, 1) + _WHOLE_COST
        in_waves = of_parts + tl.cdiv(tl.sum(whole_blocks, 1) * num_heads, resident_ctas) * of_whole
        times = tl.maximum(of_parts, tl.minimum(even + 3 * of_whole // 4, in_waves))
        fastest = tl.sum(tl.where(option == 0, times, 0), 0)
        size = tl.sum(tl.where(option == 0, sizes, 0), 0)
        for i in tl.static_range(1, _WAVES):
            time = tl.sum(tl.where(option == i, times, 0), 0)
            coarser = tl.sum(tl.where(option == i, sizes, 0), 0)
            better = 17 * time < 16 * fastest
            size = tl.where(better, coarser, size)
            fastest = tl.where(better, time, fastest)
    return size


@triton.jit
def part_of_slot(
    plan, plan_stride, num_trees, forced_parts, resident_ctas, extra, num_heads, slot,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Returns (tree, part, parts) of a slot; tree is -1 for an idle slot."""
    size = _part_size(
        plan, plan_stride, num_trees, forced_parts, resident_ctas, extra, num_heads, WINDOW, GROUP,
        BLOCK_M,
    )  # fmt: skip
    all_large = tl.zeros([_LANES], tl.int32)
    all_small = tl.zeros([_LANES], tl.int32)
    for base in range(0, num_trees, _LANES):
        tiles, _ = _trees(plan, plan_stride, num_trees, base, WINDOW)
        large, small = _slot_counts(tiles, _parts(tiles, size), size)
        all_large += large
        all_small += small
    before_large = tl.sum(all_large, 0)
    before_small = tl.sum(all_small, 0)
    end_of_parts = before_large % _HIGH
    end_of_large = end_of_parts + before_large // _HIGH
    end_of_medium = end_of_large + before_small % _HIGH
    before_large *= 0
    before_small *= 0
    found = before_large - 1
    parts_found = before_large + 1
    for base in range(0, num_trees, _LANES):
        tiles, _ = _trees(plan, plan_stride, num_trees, base, WINDOW)
        parts = _parts(tiles, size)
        large, small = _slot_counts(tiles, parts, size)
        ahead_large = before_large + tl.cumsum(large, 0) - large
        ahead_small = before_small + tl.cumsum(small, 0) - small
        first_slot = end_of_medium + ahead_small // _HIGH
        first_slot = tl.where(small == 1, end_of_large + ahead_small % _HIGH, first_slot)
        first_slot = tl.where(large >= _HIGH, end_of_parts + ahead_large // _HIGH, first_slot)
        first_slot = tl.where(parts > 1, ahead_large % _HIGH, first_slot)
        own_part = slot - first_slot
        here = (own_part >= 0) & (own_part < parts)
        tree = base + tl.arange(0, _LANES)
        found = tl.maximum(found, tl.max(tl.where(here, tree + own_part * _HIGH, -1), 0))
        parts_found = tl.maximum(parts_found, tl.max(tl.where(here, parts, 1), 0))
        before_large += tl.sum(large, 0)
        before_small += tl.sum(small, 0)
    tree = tl.where(found >= 0, found % _HIGH, -1)
    return tree, found // _HIGH, parts_found


@triton.jit
def _slot_counts(tiles, parts, size):
    """Returns two packed pairs of counts: (parts of a split tree, whole trees above the part size)
    and (whole trees above half of it, smaller whole trees)."""
    whole = parts == 1
    above_size = whole & (tiles > size)
    above_half = whole & (tiles <= size) & (2 * tiles > size)
    small = whole & (2 * tiles <= size)
    large = tl.where(parts > 1, parts, tl.where(above_size, _HIGH, 0))
    return large, tl.where(above_half, 1, tl.where(small, _HIGH, 0))
