# SPDX-License-Identifier: Apache-2.0
"""The tree mask as FlashAttention 4 takes one: a function of row and column that it compiles.

Importing this needs cutlass. No lazy annotations: cutlass reads those of traced functions.
"""

import cutlass
import cutlass.cute as cute

WORD_BITS = 32


@cute.jit
def sees(words, first, rows, context, row, column):
    """Whether row `row` of a tree sees a column: the whole context, and the tree's rows by bits.

    Args:
        words: int32 [M, W], bit j % 32 of word j // 32 of a tree's row i set where row i attends
            row j; the tree's rows begin at `first`.
        rows: of the tree. Rows and columns past the end are asked for too, and must not lead out
            of `words`; the answer is not used.
        context: columns before the tree's own.
    """
    at = column - context
    inside = cutlass.min(cutlass.max(at, 0), rows - 1)
    word = words[first + cutlass.min(row, rows - 1), inside // WORD_BITS]
    return (at < 0) | (((word >> (inside % WORD_BITS)) & 1) == 1)


def make_tree_mask():
    """The mask_mod; its `aux_tensors` are the words of `sees`."""
    from flash_attn.cute import utils

    @cute.jit
    def tree_mask(batch, head, row, column, lengths, tensors):
        seen = sees(
            tensors[0],
            lengths.offset_q,
            lengths.seqlen_q,
            lengths.seqlen_k - lengths.seqlen_q,
            utils.ssa_to_scalar(row),
            utils.ssa_to_scalar(column),
        )
        return utils.scalar_to_ssa(seen, cutlass.Boolean)

    return tree_mask
