# SPDX-License-Identifier: Apache-2.0
"""Which tree a block works on, and which part of it: found by each warp from the plan.

The grid is fixed by the launch, the lengths are on the device. Every warp reads all of them, a tree
a lane, and comes to the same schedule: parts of the trees that are cut fill the first slots, as
what is largest is best begun first, then follow the whole trees, a slot each. Slots past these have
nothing to do.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..cuda_contract import MAX_TREE_ROWS, PLAN_CONTEXT, PLAN_ROW_COUNT
from . import schedule
from .access import int32_at

LANES = 32
# Two counts in one number: whole trees below, parts of cut ones above.
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
def share(
    plan: Int64,
    trees: Int32,
    window: Int32,
    dense: Int32,
    budget: Int32,
    slots: Int32,
    lane: Int32,
) -> Int32:
    """Tiles that parts aim at; see `schedule.share_size`."""
    total = Int32(0)
    alive = Int32(0)
    for base in cutlass.range(0, trees, LANES, unroll=1):
        tiles = tiles_of(plan, trees, base + lane, window, dense)
        total = total + tiles
        alive = alive + cutlass.min(tiles, Int32(1))
    total = warp_sum(total)
    alive = cutlass.max(warp_sum(alive), Int32(1))
    fair = schedule.fair_share(total, budget)
    clipped = Int32(0)
    for base in cutlass.range(0, trees, LANES, unroll=1):
        tiles = tiles_of(plan, trees, base + lane, window, dense)
        clipped = clipped + cutlass.min(tiles, fair)
    clipped = warp_sum(clipped)
    return schedule.share_size(total, clipped, alive, fair, slots - trees)


@cute.jit
def _counts(parts: Int32) -> Int32:
    return parts * _HIGH if parts > 1 else parts


@cute.jit
def of_slot(
    plan: Int64,
    trees: Int32,
    window: Int32,
    dense: Int32,
    budget: Int32,
    # as many as trees: none is cut
    slots: Int32,
    slot: Int32,
    lane: Int32,
):
    """(tree, part, parts) of a slot; tree is -1 where there is nothing to do."""
    tree = slot
    part = Int32(0)
    parts = Int32(1)
    if slots > trees:
        size = share(plan, trees, window, dense, budget, slots, lane)
        counts = Int32(0)
        for base in cutlass.range(0, trees, LANES, unroll=1):
            tiles = tiles_of(plan, trees, base + lane, window, dense)
            counts = counts + _counts(schedule.parts_of(tiles, size))
        cut = warp_sum(counts) // _HIGH
        before = Int32(0)
        found = Int32(-1)
        for base in cutlass.range(0, trees, LANES, unroll=1):
            own = schedule.parts_of(tiles_of(plan, trees, base + lane, window, dense), size)
            summed = warp_scan(_counts(own), lane)
            ahead = before + summed - _counts(own)
            place = ahead // _HIGH if own > 1 else cut + ahead % _HIGH
            inside = slot - place
            if inside >= 0 and inside < own:
                found = base + lane + inside * _HIGH
            before = before + cute.arch.shuffle_sync(summed, LANES - 1)
        found = warp_max(found)
        tree = Int32(-1)
        if found >= 0:
            tree = found % _HIGH
            part = found // _HIGH
            parts = schedule.parts_of(tiles_of(plan, trees, tree, window, dense), size)
    return tree, part, parts


@cute.jit
def of_tree(
    plan: Int64,
    trees: Int32,
    window: Int32,
    dense: Int32,
    budget: Int32,
    slots: Int32,
    tree: Int32,
    lane: Int32,
):
    """(slot of its first part, parts) of a tree; the slot has a meaning where it has several."""
    size = share(plan, trees, window, dense, budget, slots, lane)
    first = Int32(0)
    for base in cutlass.range(0, tree, LANES, unroll=1):
        other = base + lane
        parts = schedule.parts_of(tiles_of(plan, trees, other, window, dense), size)
        if other < tree and parts > 1:
            first = first + parts
    first = warp_sum(first)
    return first, schedule.parts_of(tiles_of(plan, trees, tree, window, dense), size)
