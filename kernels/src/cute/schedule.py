# SPDX-License-Identifier: Apache-2.0
"""The columns of a tile, and the number of parts of a tree.

The columns of a tree are its context, then its tail (the tree's own rows), in tiles of TILE_N:

    paged tail    column c is cache slot c; the tail begins at column `context`
    dense tail    the tail begins at the next tile boundary; the columns between are empty

Tiles before `full_tiles` are all context and need no tree mask. With a window, no row attends tiles
before `first_tile`, which the root determines: it looks back furthest.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .config import CUT_COST, MIN_SPLIT_TILES, TILE_N, WHOLE_COST


@cute.jit
def first_visible(context: Int32, window: Int32) -> Int32:
    """Returns the first column that any row attends; `window` 0 means no window."""
    first = Int32(0)
    if window > 0:
        first = cutlass.max(context - window + 1, Int32(0))
    return first


@cute.jit
def first_tile(context: Int32, window: Int32) -> Int32:
    """Returns the first tile that any row attends; at most `full_tiles`."""
    return first_visible(context, window) // TILE_N


@cute.jit
def full_tiles(context: Int32) -> Int32:
    """Returns the number of tiles that are all context."""
    return context // TILE_N


@cute.jit
def tail_begin(context: Int32, dense: Int32) -> Int32:
    """Returns the column of the tail's row 0; `dense` is 0 or 1."""
    aligned = (context + TILE_N - 1) // TILE_N * TILE_N
    return context + dense * (aligned - context)


@cute.jit
def total_tiles(tail: Int32, rows: Int32) -> Int32:
    """Returns the tiles of a tree whose tail of `rows` rows begins at column `tail`."""
    return (tail + rows + TILE_N - 1) // TILE_N


@cute.jit
def tiles_per_part(tiles: Int32, parts: Int32) -> Int32:
    """Returns the size of `parts` equal parts, at least MIN_SPLIT_TILES; 0 parts count as 1."""
    parts = cutlass.max(parts, Int32(1))
    return cutlass.max((tiles + parts - 1) // parts, Int32(MIN_SPLIT_TILES))


@cute.jit
def wave_part_tiles(
    work: Int32, waves: cutlass.Constexpr, resident_ctas: Int32, heads: Int32
) -> Int32:
    """Returns the part size with which equal parts fill the device in `waves` waves.

    `work` is the sum of tiles times row blocks for one of `heads` KV heads.
    """
    return tiles_per_part(work, waves * resident_ctas // heads)


@cute.jit
def row_blocks(rows: Int32, group: Int32, tile_m: cutlass.Constexpr) -> Int32:
    """Returns the row blocks of a tree."""
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
    """Estimates the time until the last block ends, in tiles.

    Blocks of split trees run first, in waves: `cut_blocks` per head, of at most `largest_part`
    tiles. Blocks of whole trees follow. They either fill the device evenly
    and overhang by three quarters of the largest (a result of simulations), or run in waves; the
    shorter time counts. `load` is the total time of a head's blocks, in tiles.
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
    """Returns the parts of a tree, each of at most 5/4 `size` tiles; 0 for a tree without tiles."""
    parts = (4 * tiles + 3 * size - 1) // (4 * size)
    return cutlass.max(parts, cutlass.min(tiles, Int32(1)))


@cute.jit
def part_begin(first: Int32, tiles: Int32, parts: Int32, part: Int32) -> Int32:
    """Returns the first tile of `part`. The first tile of `part + 1` is its end."""
    return first + tiles * part // parts
