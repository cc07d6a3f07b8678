# SPDX-License-Identifier: Apache-2.0
"""Which columns a tile holds, and which tiles a split takes.

The columns of a tree are its context, then its tail (the tree's own rows). They are cut into
tiles of TILE_N:

    paged tail    column c is cache slot c; the tail begins at column `context`
    dense tail    the tail begins at the next tile boundary; the columns between are empty

Tiles below `full_tiles` lie within the context and need no mask.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .config import MIN_SPLIT_TILES, TILE_N


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
def tiles_per_split(total: Int32, splits: Int32) -> Int32:
    """Tiles of every split but the last. Short rows use fewer splits than the grid has."""
    return cutlass.max((total + splits - 1) // splits, Int32(MIN_SPLIT_TILES))


@cute.jit
def split_begin(total: Int32, splits: Int32, split: Int32) -> Int32:
    """First tile of `split`; with split + 1 its end. An empty split has begin == end."""
    return cutlass.min(split * tiles_per_split(total, splits), total)


@cute.jit
def used_splits(total: Int32, splits: Int32) -> Int32:
    """Splits that have a tile: 0..used - 1."""
    per_split = tiles_per_split(total, splits)
    return (total + per_split - 1) // per_split
