# SPDX-License-Identifier: Apache-2.0
"""Ancestor masks: from parents to 64-bit words, and from words to the bits of one tile.

Distances do not need the positions of tree rows. A row attends a chain, so its distance to a key is
the number of attended columns after the key.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint64

from .config import MASK_WORDS, TILE_N, WORD_BITS


@cute.jit
def low_bits(count: Int32) -> Uint64:
    """Returns a word with the `count` lowest bits set; `count` is clamped to 0..64."""
    clipped = cutlass.min(cutlass.max(count, Int32(0)), Int32(WORD_BITS))
    # A shift by 64 is undefined, so the full word is a separate case.
    partial = (Uint64(1) << Uint64(clipped & (WORD_BITS - 1))) - Uint64(1)
    return ~Uint64(0) if clipped == WORD_BITS else partial


@cute.jit
def write_words(
    # [MAX_TREE_ROWS]: row of each row's parent, -1 for row 0
    parents: cute.Tensor,
    # [tile rows, MASK_WORDS], row `slot` is written
    words: cute.Tensor,
    slot: Int32,
    row: Int32,
    rows: Int32,
    full: Int32,
):
    """Writes the mask of tree row `row`: itself and its ancestors, or all `rows` rows if full is 1.

    A parent precedes its child, so the walk visits words from high to low and stores each once. A
    parent that does not precede its child ends the walk, so garbage in the buffer cannot loop it.
    """
    for word in cutlass.range_constexpr(MASK_WORDS):
        bits = low_bits(rows - word * WORD_BITS)
        words[slot, word] = bits if full == 1 else Uint64(0)
    if full == 0:
        at = row
        word = row // WORD_BITS
        bits = Uint64(0)
        while at >= 0:
            if at // WORD_BITS != word:
                words[slot, word] = bits
                word = at // WORD_BITS
                bits = Uint64(0)
            bits = bits | (Uint64(1) << Uint64(at & (WORD_BITS - 1)))
            parent = parents[at]
            at = parent if parent < at else Int32(-1)
        words[slot, word] = bits


@cute.jit
def tile_window(
    # [tile rows, MASK_WORDS]
    words: cute.Tensor,
    slot: Int32,
    # first column of the tile, not below the full tiles
    column: Int32,
    context: Int32,
    # column of the tail's row 0
    tail: Int32,
) -> Uint64:
    """Returns the mask of a tile: bit c is set if the row of `slot` attends column `column` + c."""
    offset = column - tail
    window = Uint64(0)
    if offset < 0:
        window = low_bits(context - column)
        if offset > -TILE_N:
            window = window | (words[slot, 0] << Uint64(-offset))
    else:
        word = offset // WORD_BITS
        shift = offset & (WORD_BITS - 1)
        window = words[slot, word] >> Uint64(shift)
        if shift > 0:
            window = window | (words[slot, word + 1] << Uint64(WORD_BITS - shift))
    return window


@cute.jit
def rows_from(
    # [tile rows, MASK_WORDS]
    words: cute.Tensor,
    slot: Int32,
    first: Int32,
) -> Int32:
    """Returns how many tree rows from row `first` on the row of `slot` attends."""
    count = Int32(0)
    for word in cutlass.range_constexpr(MASK_WORDS):
        kept = words[slot, word] & ~low_bits(first - word * WORD_BITS)
        count = count + Int32(cute.arch.popc(kept))
    return count


@cute.jit
def context_window(position: Int32, window: Int32, column: Int32) -> Uint64:
    """Returns the window mask of a context tile: bit c is set if a row at `position` attends column
    `column` + c."""
    return ~low_bits(position - window + 1 - column)


@cute.jit
def keep_last(bits: Uint64, after: Int32, window: Int32) -> Uint64:
    """Clears the lowest set bits until the rest and `after` later columns are at most `window`."""
    count = Int32(cute.arch.popc(bits))
    drop = cutlass.min(after + count - window, count)
    while drop > 0:
        bits = bits & (bits - Uint64(1))
        drop = drop - 1
    return bits
