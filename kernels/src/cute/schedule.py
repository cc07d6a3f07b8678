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

from .config import MIN_SPLIT_TILES, TILE_N


@cute.jit
def first_seen(context: Int32, window: Int32) -> Int32:
    """First column that a row attends; `window` is 0 for none."""
    seen = Int32(0)
    if window > 0:
        seen = cutlass.max(context - window + 1, Int32(0))
    return seen


@cute.jit
def first_tile(context: Int32, window: Int32) -> Int32:
    """First tile that a row attends; not past the full tiles."""
    return first_seen(context, window) // TILE_N


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
def fair_share(total: Int32, budget: Int32) -> Int32:
    """Tiles of a part if all `total` tiles were cut into `budget` of them."""
    return cutlass.max((total + budget - 1) // budget, Int32(MIN_SPLIT_TILES))


@cute.jit
def share_size(total: Int32, clipped: Int32, trees: Int32, fair: Int32, extra: Int32) -> Int32:
    """Tiles that parts aim at.

    `clipped` is the sum of what `trees` trees have, at most `fair` each: where most are smaller
    than the fair share, large ones are cut so that no part is much larger than the others. There
    are slots for `extra` parts besides one a tree.
    """
    usual = (5 * clipped + 4 * trees - 1) // (4 * trees)
    least = cutlass.max((total + extra - 1) // extra, Int32(MIN_SPLIT_TILES))
    return cutlass.max(cutlass.min(fair, usual), least)


@cute.jit
def parts_of(tiles: Int32, share: Int32) -> Int32:
    """Parts of a tree, none of which exceeds five quarters of a share; 0 for one without tiles."""
    parts = (4 * tiles + 3 * share - 1) // (4 * share)
    return cutlass.max(parts, cutlass.min(tiles, Int32(1)))


@cute.jit
def part_begin(first: Int32, tiles: Int32, parts: Int32, part: Int32) -> Int32:
    """First tile of `part`; with part + 1 its end."""
    return first + tiles * part // parts
