# SPDX-License-Identifier: Apache-2.0
"""Work of a warpgroup on its rows besides the GEMMs: masks, sinks, output."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import mask, softmax
from .access import ELEMENT_BYTES, global_array, scalar_at
from .config import TILE_N, ForwardConfig

LOG2_E = math.log2(math.e)


class Rows:
    """Mixin of the attention kernel. `p`: its parameters; `b`: a `Bundle` of the block's state."""

    config: ForwardConfig

    @cute.jit
    def mask_slot(self, p, first_packed: Int32, packed: Int32, packed_rows: Int32) -> Int32:
        """Returns the row of the mask words of a packed row; padding uses the last real row."""
        clipped = cutlass.min(packed, packed_rows - 1)
        return clipped // p.group - first_packed // p.group

    @cute.jit
    def store(
        self, p, b, slot: Int32, part: Int32, parts: Int32, wg_packed: Int32,
        wg_thread: Int32, output: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor,
    ):  # fmt: skip
        """Normalises and stores the rows, or their partial results if the tree is split."""
        flat = cute.make_tensor(output.iterator, cute.make_layout(cute.size(output)))
        num_heads = p.num_kv_heads * p.group
        for r in cutlass.range_constexpr(softmax.ROWS):
            sum_ = softmax.quad_sum(row_sum[r])
            packed = wg_packed + softmax.row_of(wg_thread, r)
            if packed < b.packed_rows:
                tree_row = packed // p.group
                head = b.kv_head * p.group + packed % p.group
                # A row that attends no column of this part has sum 0 and contributes nothing.
                # A NaN sum is kept: the row attends NaN.
                correction = Float32(1.0)
                top = row_max[r] * p.scale_log2
                if p.sinks != 0 and part == 0:
                    sink = scalar_at(p.sinks, head, p.sink_dtype) * LOG2_E
                    highest = cute.arch.fmax(top, sink)
                    reference = Float32(0.0) if highest == -Float32.inf else highest
                    correction = cute.math.exp2(top - reference, fastmath=True)
                    sum_ = sum_ * correction + cute.math.exp2(sink - reference, fastmath=True)
                    top = reference
                inverse = correction / sum_ if sum_ != 0.0 else Float32(0.0)
                column = wg_thread % 4 * 2
                if parts > 1:
                    index = (Int64(slot) * p.part_rows + tree_row) * num_heads + head
                    if wg_thread % 4 == 0:
                        lse = -Float32.inf
                        if sum_ != 0.0:
                            lse = top + cute.math.log2(sum_, fastmath=True)
                        global_array(Float32, p.part_lse + index * 4, 1)[0] = lse
                    first = p.part_out + (index * self.config.head_dim + column) * 4
                    self.store_row(flat, r, inverse, first, Float32)
                else:
                    element = (
                        Int64(b.row_start + tree_row) * p.output_row
                        + Int64(head) * p.output_head
                        + column
                    )
                    first = p.output + element * ELEMENT_BYTES
                    self.store_row(flat, r, inverse, first, self.dtype)

    @cute.jit
    def store_row(
        self, flat: cute.Tensor, r: cutlass.Constexpr, inverse: Float32, first: Int64,
        element: cutlass.Constexpr,
    ):  # fmt: skip
        """Stores a thread's pairs of accumulator row r, 8 columns apart, scaled by `inverse`."""
        for j in cutlass.range_constexpr(cute.size(flat) // 4):
            pair = cute.make_rmem_tensor(cute.make_layout(2), element)
            for c in cutlass.range_constexpr(2):
                pair[c] = (flat[c + 2 * r + 4 * j] * inverse).to(element)
            cute.autovec_copy(pair, global_array(element, first + 8 * j * element.width // 8, 2))

    @cute.jit
    def load_row_positions(
        self, p, b, s_words: cute.Tensor, wg_packed: Int32, wg_thread: Int32,
        positions: cute.Tensor,
    ):  # fmt: skip
        """Sets the positions of a thread's rows."""
        for r in cutlass.range_constexpr(softmax.ROWS):
            last = cutlass.min(wg_packed + softmax.row_of(wg_thread, r), b.packed_rows - 1)
            own = self.mask_slot(p, b.first_packed, last, b.packed_rows)
            positions[r] = b.context + mask.rows_from(s_words, own, Int32(0)) - 1

    @cute.jit
    def mask_scores(
        self, p, b, s_words: cute.Tensor, tile: Int32, wg_packed: Int32, wg_thread: Int32,
        positions: cute.Tensor, scores: cute.Tensor,
    ):  # fmt: skip
        """Applies the masks to the scores of a tile."""
        config = self.config
        column = tile * TILE_N
        if tile >= b.full_end:
            for r in cutlass.range_constexpr(softmax.ROWS):
                packed = wg_packed + softmax.row_of(wg_thread, r)
                slot = self.mask_slot(p, b.first_packed, packed, b.packed_rows)
                bits = mask.tile_window(s_words, slot, column, b.context, b.tail)
                if cutlass.const_expr(config.window):
                    after = mask.rows_from(s_words, slot, column + TILE_N - b.tail)
                    bits = mask.keep_last(bits, after, p.window)
                softmax.mask_row(scores, r, bits, wg_thread % 32)
        else:
            if cutlass.const_expr(config.window):
                if column < b.visible_to_all:
                    for r in cutlass.range_constexpr(softmax.ROWS):
                        bits = mask.context_window(positions[r], p.window, column)
                        softmax.mask_row(scores, r, bits, wg_thread % 32)
