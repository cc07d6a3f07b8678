# SPDX-License-Identifier: Apache-2.0
"""The mask that FlashAttention 4 is measured with, compiled for this CPU, against the trees."""

# No lazy annotations: cutlass reads those of traced functions.

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.paged import path_of, random_parents

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack

sys.path.append(str(Path(__file__).parents[2] / "bench" / "gpu"))
from fa4_mask import WORD_BITS, sees

pytestmark = [
    pytest.mark.xdist_group("cute64"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@cute.jit
def mask_of(words: cute.Tensor, first: Int32, rows: Int32, context: Int32, out: cute.Tensor):
    for row in cutlass.range(cute.size(out, mode=[0])):
        for column in cutlass.range(cute.size(out, mode=[1])):
            out[row, column] = Int32(sees(words, first, rows, context, row, column))


def test_rows_see_the_context_and_their_ancestors():
    rng = np.random.default_rng(0)
    trees = [random_parents(n, rng) for n in (0, 5, 40, 70)]
    rows = [len(parents) + 1 for parents in trees]
    words = np.zeros((sum(rows), -(-max(rows) // WORD_BITS)), np.uint32)
    starts = np.cumsum([0, *rows])
    for parents, start, count in zip(trees, starts, rows, strict=False):
        for row in range(count):
            for j in path_of(parents, row):
                words[start + row, j // WORD_BITS] |= np.uint32(1 << j % WORD_BITS)
    bits = from_dlpack(torch.from_numpy(words.view(np.int32)))
    compiled = None
    for parents, start, count in zip(trees, starts, rows, strict=False):
        for context in (0, 1, 33):
            # As in a kernel: tiles reach past the last row and column.
            found = torch.full((count + 3, context + count + 9), 7, dtype=torch.int32)
            arguments = (bits, int(start), count, context, from_dlpack(found).mark_layout_dynamic())
            if compiled is None:
                compiled = cute.compile(mask_of, *arguments)
            compiled(*arguments)
            for row in range(count):
                seen = {*range(context), *(context + j for j in path_of(parents, row))}
                end = context + count
                assert set(np.flatnonzero(found[row, :end].numpy())) == seen, (count, context, row)
