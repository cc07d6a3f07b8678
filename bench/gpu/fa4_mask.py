# SPDX-License-Identifier: Apache-2.0
"""The tree mask for FlashAttention 4: a function of row and column that it compiles.

Importing this needs cutlass, which reads annotations of traced functions, so they must not be lazy.
"""

import cutlass
import cutlass.cute as cute

WORD_BITS = 32


@cute.jit
def sees(words, first, rows, context, row, column):
    """Whether row `row` of a tree attends a column of the context or, by bits, of the tree.

    Args:
        words: int32 [M, W]: bit j % 32 of word j // 32 of a tree's row i is set if row i attends
            row j; the tree's rows begin at `first`.
        rows: rows of the tree. Rows and columns past the end must not lead out of `words`; their
            result is not used.
        context: number of columns before the tree's own.
    """
    at = column - context
    inside = cutlass.min(cutlass.max(at, 0), rows - 1)
    word = words[first + cutlass.min(row, rows - 1), inside // WORD_BITS]
    return (at < 0) | (((word >> (inside % WORD_BITS)) & 1) == 1)


def make_tree_mask():
    """Returns the mask_mod; its `aux_tensors` are the words of `sees`."""
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
