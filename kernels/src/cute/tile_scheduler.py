# SPDX-License-Identifier: Apache-2.0
"""Which tree a block works on, and which part of it: found from the plan by a warp of each block.

The grid is fixed by the launch, the lengths are on the device. The warp reads all of them, a tree a
lane. Of a few sizes of parts it takes the one by which the device is done first, see
`schedule.estimate_makespan`, and comes to the same schedule as every other block: parts of the trees that
are cut fill the first slots, as what is largest is best begun first, then follow whole trees in
three classes of size. Slots past these have nothing to do.

Blocks of a slot, for all row blocks and heads, take the same columns: they run at about the same
time, so that the row blocks of a head share in L2 what they read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..cuda_contract import MAX_TREE_ROWS, PLAN_CONTEXT, PLAN_ROW_COUNT
from . import schedule
from .access import int32_at
from .config import CUT_COST, WAVES, WHOLE_COST

LANES = 32
# Two counts in one number.
_HIGH = 1 << 16


@cute.jit
def tiles_of(plan: Int64, trees: Int32, tree: Int32, window: Int32, dense: Int32) -> Int32:
    """Tiles that a tree's rows attend; 0 for a skipped tree, and past the last."""
    tiles = Int32(0)
    if tree < trees:
        rows = cutlass.min(int32_at(plan, PLAN_ROW_COUNT * trees + tree), Int32(MAX_TREE_ROWS))
        if rows > 0:
            context = int32_at(plan, PLAN_CONTEXT * trees + tree)
            tail = schedule.tail_begin(context, dense)
            first = schedule.first_tile(context, window)
            tiles = schedule.total_tiles(tail, rows) - first
    return tiles


@cute.jit
def row_blocks_of(
    plan: Int64, trees: Int32, tree: Int32, group: Int32, tile_m: cutlass.Constexpr
) -> Int32:
    """Row blocks of a tree; 0 past the last."""
    blocks = Int32(0)
    if tree < trees:
        rows = cutlass.min(int32_at(plan, PLAN_ROW_COUNT * trees + tree), Int32(MAX_TREE_ROWS))
        blocks = schedule.row_blocks(rows, group, tile_m)
    return blocks


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
    """Sum of the lanes up to this one."""
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, offset=1 << i)
        value = value + (below if lane >= (1 << i) else Int32(0))
    return value


@cute.jit
def part_size(p, window: Int32, lane: Int32, tile_m: cutlass.Constexpr) -> Int32:
    """Tiles that parts aim at, of the kernel's parameters `p`.

    The finest of the sizes by waves, unless a coarser one is at least a sixteenth faster.
    """
    total = Int32(0)
    work = Int32(0)
    for base in cutlass.range(0, p.num_trees, LANES, unroll=1):
        tiles = tiles_of(p.plan, p.num_trees, base + lane, window, p.dense)
        blocks = row_blocks_of(p.plan, p.num_trees, base + lane, p.group, tile_m)
        total = total + tiles
        work = work + tiles * blocks
    # Parts must find their slots, whatever the lengths.
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
            tiles = tiles_of(p.plan, p.num_trees, base + lane, window, p.dense)
            blocks = row_blocks_of(p.plan, p.num_trees, base + lane, p.group, tile_m)
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
    """Parts of a cut tree, whole trees above a share, above half of one, and of less: two in a
    number each."""
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
    """(tree, part, parts) of a slot; tree is -1 where there is nothing to do."""
    size = part_size(p, window, lane, tile_m)
    large = Int32(0)
    small = Int32(0)
    for base in cutlass.range(0, p.num_trees, LANES, unroll=1):
        tiles = tiles_of(p.plan, p.num_trees, base + lane, window, p.dense)
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
        tiles = tiles_of(p.plan, p.num_trees, base + lane, window, p.dense)
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
        parts = schedule.parts_of(tiles_of(p.plan, p.num_trees, tree, window, p.dense), size)
    return tree, part, parts
