# SPDX-License-Identifier: Apache-2.0
"""Finds which tree a block works on, and which part of it. One warp of each block computes it.

The launch fixes the grid, but only the device knows the lengths. The warp reads all of them, one
tree per lane. Of a few part sizes it takes the one with the smallest `schedule.estimate_makespan`.
All blocks compute the same schedule: the parts of split trees have the first slots, because long
blocks should start first; whole trees in three size classes follow. The other slots are idle.

The blocks of a slot (all row blocks and heads) read the same columns at about the same time, so the
row blocks of a head share them in L2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..cuda_contract import MAX_TREE_ROWS, PLAN_CONTEXT, PLAN_ROW_COUNT
from . import schedule
from .access import int32_at
from .config import CUT_COST, WAVES, WHOLE_COST

LANES = 32
# Two counts are packed in one number, the second in units of this.
_HIGH = 1 << 16


@cute.jit
def size_of(p, tree: Int32, window: Int32, tile_m: cutlass.Constexpr):
    """Returns the tiles that a tree's rows attend, and its row blocks; 0 for a skipped tree and
    after the last tree. `p` are the kernel's parameters."""
    tiles = Int32(0)
    blocks = Int32(0)
    if tree < p.num_trees:
        rows = cutlass.min(
            int32_at(p.plan, PLAN_ROW_COUNT * p.num_trees + tree), Int32(MAX_TREE_ROWS)
        )
        if rows > 0:
            context = int32_at(p.plan, PLAN_CONTEXT * p.num_trees + tree)
            tail = schedule.tail_begin(context, p.dense)
            first = schedule.first_tile(context, window)
            tiles = schedule.total_tiles(tail, rows) - first
            blocks = schedule.row_blocks(rows, p.group, tile_m)
    return tiles, blocks


@cute.jit
def warp_sum(value: Int32) -> Int32:
    for i in cutlass.range_constexpr(5):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << i)
    return value


@cute.jit
def warp_max(value: Int32) -> Int32:
    for i in cutlass.range_constexpr(5):
        value = cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=1 << i))
    return value


@cute.jit
def warp_scan(value: Int32, lane: Int32) -> Int32:
    """Returns the inclusive prefix sum over the lanes."""
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, offset=1 << i)
        value = value + (below if lane >= (1 << i) else Int32(0))
    return value


@cute.jit
def part_size(p, window: Int32, lane: Int32, tile_m: cutlass.Constexpr) -> Int32:
    """Returns the target size of parts in tiles; `p` are the kernel's parameters.

    Takes the size with the most waves, unless a coarser one is at least a sixteenth faster.
    """
    total = Int32(0)
    work = Int32(0)
    for base in cutlass.range(0, p.num_trees, LANES, unroll=1):
        tiles, blocks = size_of(p, base + lane, window, tile_m)
        total = total + tiles
        work = work + tiles * blocks
    # The parts must fit the slots for all lengths.
    least = schedule.tiles_per_part(warp_sum(total), p.slots - p.num_trees)
    size = cutlass.max(schedule.tiles_per_part(warp_sum(total), p.forced_parts), least)
    if p.forced_parts == 0:
        work = warp_sum(work)
        count = len(WAVES)
        layout = cute.make_layout(count)
        sizes = cute.make_rmem_tensor(layout, Int32)
        cut_blocks = cute.make_rmem_tensor(layout, Int32)
        largest_part = cute.make_rmem_tensor(layout, Int32)
        load = cute.make_rmem_tensor(layout, Int32)
        whole_blocks = cute.make_rmem_tensor(layout, Int32)
        largest_whole = cute.make_rmem_tensor(layout, Int32)
        for i in cutlass.range_constexpr(count):
            waves = schedule.wave_part_tiles(work, WAVES[i], p.resident_ctas, p.num_kv_heads)
            sizes[i] = cutlass.max(waves, least)
            cut_blocks[i] = Int32(0)
            largest_part[i] = Int32(0)
            load[i] = Int32(0)
            whole_blocks[i] = Int32(0)
            largest_whole[i] = Int32(0)
        for base in cutlass.range(0, p.num_trees, LANES, unroll=1):
            tiles, blocks = size_of(p, base + lane, window, tile_m)
            for i in cutlass.range_constexpr(count):
                parts = schedule.parts_of(tiles, sizes[i])
                if parts > 1:
                    cut_blocks[i] = cut_blocks[i] + blocks * parts
                    largest = (tiles + parts - 1) // parts
                    largest_part[i] = cutlass.max(largest_part[i], largest)
                    load[i] = load[i] + blocks * (tiles + CUT_COST * parts)
                else:
                    load[i] = load[i] + blocks * (tiles + WHOLE_COST)
                    whole_blocks[i] = whole_blocks[i] + blocks
                    largest_whole[i] = cutlass.max(largest_whole[i], tiles)
        fastest = Int32(0)
        for i in cutlass.range_constexpr(count):
            time = schedule.estimate_makespan(
                warp_sum(cut_blocks[i]),
                warp_max(largest_part[i]),
                warp_sum(load[i]),
                warp_sum(whole_blocks[i]),
                warp_max(largest_whole[i]),
                p.num_kv_heads,
                p.resident_ctas,
            )
            if i == 0 or 17 * time < 16 * fastest:
                fastest = time
                size = sizes[i]
    return size


@cute.jit
def _slot_counts(tiles: Int32, parts: Int32, size: Int32):
    """Returns two packed pairs of counts: (parts of a split tree, whole trees above the part size)
    and (whole trees above half of it, smaller whole trees)."""
    large = Int32(0)
    small = Int32(0)
    if parts > 1:
        large = parts
    elif tiles > size:
        large = Int32(_HIGH)
    elif 2 * tiles > size:
        small = Int32(1)
    elif tiles > 0:
        small = Int32(_HIGH)
    return large, small


@cute.jit
def work_of_slot(p, window: Int32, slot: Int32, lane: Int32, tile_m: cutlass.Constexpr):
    """Returns (tree, part, parts) of a slot; tree is -1 for an idle slot."""
    size = part_size(p, window, lane, tile_m)
    large = Int32(0)
    small = Int32(0)
    for base in cutlass.range(0, p.num_trees, LANES, unroll=1):
        tiles, _ = size_of(p, base + lane, window, tile_m)
        own_large, own_small = _slot_counts(tiles, schedule.parts_of(tiles, size), size)
        large = large + own_large
        small = small + own_small
    large = warp_sum(large)
    small = warp_sum(small)
    end_of_parts = large % _HIGH
    end_of_large = end_of_parts + large // _HIGH
    end_of_medium = end_of_large + small % _HIGH
    large = Int32(0)
    small = Int32(0)
    found = Int32(-1)
    for base in cutlass.range(0, p.num_trees, LANES, unroll=1):
        tiles, _ = size_of(p, base + lane, window, tile_m)
        parts = schedule.parts_of(tiles, size)
        own_large, own_small = _slot_counts(tiles, parts, size)
        summed_large = warp_scan(own_large, lane)
        summed_small = warp_scan(own_small, lane)
        before_large = large + summed_large - own_large
        before_small = small + summed_small - own_small
        first_slot = before_large % _HIGH
        if parts == 1:
            first_slot = end_of_parts + before_large // _HIGH
            if own_small == 1:
                first_slot = end_of_large + before_small % _HIGH
            elif own_small > 1:
                first_slot = end_of_medium + before_small // _HIGH
        own_part = slot - first_slot
        if own_part >= 0 and own_part < parts:
            found = base + lane + own_part * _HIGH
        large = large + cute.arch.shuffle_sync(summed_large, LANES - 1)
        small = small + cute.arch.shuffle_sync(summed_small, LANES - 1)
    found = warp_max(found)
    tree = Int32(-1)
    part = Int32(0)
    parts = Int32(1)
    if found >= 0:
        tree = found % _HIGH
        part = found // _HIGH
        tiles, _ = size_of(p, tree, window, tile_m)
        parts = schedule.parts_of(tiles, size)
    return tree, part, parts
