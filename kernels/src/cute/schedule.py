# SPDX-License-Identifier: Apache-2.0
"""Which columns a tile holds, and how many parts the tiles of a tree are cut into.

The columns of a tree are its context, then its tail (the tree's own rows). They are cut into
tiles of TILE_N:

    paged tail    column c is cache slot c; the tail begins at column `context`
    dense tail    the tail begins at the next tile boundary; the columns between are empty

Tiles below `full_tiles` lie within the context and need no mask of the tree. With a window, tiles
before `first_tile` are out of every row's sight: the root looks back furthest.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .config import CUT_COST, MIN_SPLIT_TILES, TILE_N, WHOLE_COST


@cute.jit
def first_visible(context: Int32, window: Int32) -> Int32:
    """First column that a row attends; `window` is 0 for none."""
    first = Int32(0)
    if window > 0:
        first = cutlass.max(context - window + 1, Int32(0))
    return first


@cute.jit
def first_tile(context: Int32, window: Int32) -> Int32:
    """First tile that a row attends; not past the full tiles."""
    return first_visible(context, window) // TILE_N


@cute.jit
def full_tiles(context: Int32) -> Int32:
    """Tiles all of whose columns are context."""
    return context // TILE_N


@cute.jit
def tail_begin(context: Int32, dense: Int32) -> Int32:
    """Column of the tail's row 0; `dense` is 0 or 1."""
    aligned = (context + TILE_N - 1) // TILE_N * TILE_N
    return context + dense * (aligned - context)


@cute.jit
def total_tiles(tail: Int32, rows: Int32) -> Int32:
    """Tiles of a tree whose tail of `rows` rows begins at column `tail`."""
    return (tail + rows + TILE_N - 1) // TILE_N


@cute.jit
def tiles_per_part(tiles: Int32, parts: Int32) -> Int32:
    """Tiles of each of `parts` parts, at least; 0 parts count as 1."""
    parts = cutlass.max(parts, Int32(1))
    return cutlass.max((tiles + parts - 1) // parts, Int32(MIN_SPLIT_TILES))


@cute.jit
def wave_part_tiles(
    work: Int32, waves: cutlass.Constexpr, resident_ctas: Int32, heads: Int32
) -> Int32:
    """Tiles of a part where blocks of equal parts would fill `resident_ctas` resident_ctas `waves` times.

    `work` is the sum of tiles times row blocks, of one of `heads` KV heads.
    """
    return tiles_per_part(work, waves * resident_ctas // heads)


@cute.jit
def row_blocks(rows: Int32, group: Int32, tile_m: cutlass.Constexpr) -> Int32:
    """Row blocks of a tree."""
    return (rows * group + tile_m - 1) // tile_m


@cute.jit
def estimate_makespan(
    cut_blocks: Int32,
    largest_part: Int32,
    load: Int32,
    whole_blocks: Int32,
    largest_whole: Int32,
    heads: Int32,
    resident_ctas: Int32,
) -> Int32:
    """Tiles until the last place is done, about.

    First come the blocks of parts, `cut_blocks` of each head and at most `largest_part` tiles each,
    in waves; then whole trees, of which the last overhang, by three quarters of the largest in
    simulations, unless they are so few that waves of them, too, are done before. `load` is all that
    the blocks of a head take, in tiles.
    """
    waves = (cut_blocks * heads + resident_ctas - 1) // resident_ctas
    of_parts = waves * (largest_part + CUT_COST)
    even = (load * heads + resident_ctas - 1) // resident_ctas
    overhang = 3 * (largest_whole + WHOLE_COST) // 4
    whole_waves = (whole_blocks * heads + resident_ctas - 1) // resident_ctas
    in_waves = of_parts + whole_waves * (largest_whole + WHOLE_COST)
    return cutlass.max(of_parts, cutlass.min(even + overhang, in_waves))


@cute.jit
def parts_of(tiles: Int32, size: Int32) -> Int32:
    """Parts of a tree, none of which exceeds five quarters of a share; 0 for one without tiles."""
    parts = (4 * tiles + 3 * size - 1) // (4 * size)
    return cutlass.max(parts, cutlass.min(tiles, Int32(1)))


@cute.jit
def part_begin(first: Int32, tiles: Int32, parts: Int32, part: Int32) -> Int32:
    """First tile of `part`; with part + 1 its end."""
    return first + tiles * part // parts
