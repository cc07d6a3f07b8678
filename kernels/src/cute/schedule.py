# SPDX-License-Identifier: Apache-2.0
"""Which columns a tile holds, and which tiles a split takes.

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
def tiles_per_split(tiles: Int32, splits: Int32) -> Int32:
    """Tiles of every split but the last. Short rows use fewer splits than the grid has."""
    return cutlass.max((tiles + splits - 1) // splits, Int32(MIN_SPLIT_TILES))


@cute.jit
def split_begin(first: Int32, total: Int32, splits: Int32, split: Int32) -> Int32:
    """First tile of `split` of the tiles from `first` to `total`; with split + 1 its end. An empty
    split has begin == end."""
    return cutlass.min(first + split * tiles_per_split(total - first, splits), total)


@cute.jit
def used_splits(first: Int32, total: Int32, splits: Int32) -> Int32:
    """Splits that have a tile: 0..used - 1."""
    tiles = total - first
    per_split = tiles_per_split(tiles, splits)
    return (tiles + per_split - 1) // per_split
