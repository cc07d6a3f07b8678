# SPDX-License-Identifier: Apache-2.0
"""Ancestor words of a step's trees, made on the device from parent rows.

It runs once per step, before the first layer. Letters: R trees, M tree rows, W words per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["plan_stride", "words_stride"])
def _tree_words_kernel(
    # [5, R] int32: request, first query row, rows, context length, first mask row
    plan,
    # [M] int32
    parent_rows,
    # [M, W] int64
    words,
    plan_stride,
    words_stride,
    WORDS: tl.constexpr,
    PADDED_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tree = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(plan + 2 * plan_stride + tree)
    first = tl.load(plan + 4 * plan_stride + tree).to(tl.int64)
    valid = row < count
    word = tl.arange(0, PADDED_WORDS)
    bits = tl.zeros([BLOCK, PADDED_WORDS], tl.int64)
    at = tl.where(valid, row, -1)
    # Up to the root, one generation per iteration.
    while tl.max(at, 0) >= 0:
        bit = tl.full([BLOCK], 1, tl.int64) << (at & 63).to(tl.int64)
        here = ((at >> 6)[:, None] == word[None, :]) & (at >= 0)[:, None]
        bits = bits | tl.where(here, bit[:, None], 0)
        parent = tl.load(parent_rows + first + at, mask=at >= 0, other=-1)
        # An entry that does not precede its row ends the walk.
        at = tl.where(parent < at, parent, -1)
    at_word = words + (first + row)[:, None] * words_stride + word[None, :]
    tl.store(at_word, bits, mask=valid[:, None] & (word < WORDS)[None, :])


def fill_tree_words(
    # [5, R] int32
    plan: torch.Tensor,
    # [M] int32
    parent_rows: torch.Tensor,
    # [M, W] int64, written in place
    words: torch.Tensor,
    max_rows: int,
) -> None:
    """Sets bit j % 64 of word j // 64 of row i if row i is j or descends from it.

    Rows that belong to no tree are not written. `max_rows` bounds the rows of a tree.
    No host synchronisation.
    """
    num_trees = plan.shape[1]
    if num_trees == 0 or max_rows == 0:
        return
    assert words.shape[1] * 64 >= max_rows, (words.shape, max_rows)
    assert plan.is_contiguous() and words.is_contiguous()
    block = 64
    _tree_words_kernel[(num_trees, triton.cdiv(max_rows, block))](
        plan,
        parent_rows,
        words,
        plan.stride(0),
        words.stride(0),
        WORDS=words.shape[1],
        PADDED_WORDS=triton.next_power_of_2(words.shape[1]),
        BLOCK=block,
        num_warps=2,
    )
