# SPDX-License-Identifier: Apache-2.0
"""Online softmax on the accumulator of one warpgroup, and the layout of that accumulator.

A wgmma accumulator m64nN holds in thread t of the warpgroup, at flat index c + 2 * r + 4 * j,
row 16 * (t // 32) + (t % 32) // 4 + 8 * r and column 8 * j + 2 * (t % 4) + c. The four
threads of a quad hold a row. Sixteen consecutive columns in this order form a register operand of
wgmma, so P becomes operand A of the second GEMM without a shuffle.

Weights are exp2((score - max) * scale * log2(e)).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint64

ROWS = 2  # rows of one thread
# Largest log2 of a weight: sums stay far within float32, weights within float16.
RESCALE_THRESHOLD = 8.0


@cute.jit
def quad_max(value: Float32) -> Float32:
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2))


@cute.jit
def quad_sum(value: Float32) -> Float32:
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


@cute.jit
def mask_row(scores: cute.Tensor, r: cutlass.Constexpr, window: Uint64, lane: Int32):
    """Sets the scores of a thread's row r to -inf where the bit of `window` is 0."""
    own = window >> Uint64(2 * (lane % 4))
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for c in cutlass.range_constexpr(2):
            index = cutlass.const_expr(c + 2 * r + 4 * j)
            bit = (own >> Uint64(8 * j + c)) & Uint64(1)
            scores[index] = scores[index] if bit == 1 else -Float32.inf


@cute.jit
def online_softmax(
    # accumulator of the scores; replaced by the weights
    scores: cute.Tensor,
    # accumulator of the output; rescaled
    output: cute.Tensor,
    # [ROWS] reference score (a running maximum, see below) and this thread's part of the
    # running sum
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    scale_log2: Float32,
):
    """Adds one tile to the running maximum and sum. Rows without an attended column keep sum 0.

    The reference score changes only if a score exceeds it by more than RESCALE_THRESHOLD. Weights
    up to 2 ** RESCALE_THRESHOLD are as precise, also in 16 bits, and rescaling the output for every
    tile would be an eighth of all instructions.
    """
    for r in cutlass.range_constexpr(ROWS):
        highest = _highest(scores, row_max, r)
        # True for a first attended column (the difference is inf), false for an empty row (NaN).
        if (highest - row_max[r]) * scale_log2 > RESCALE_THRESHOLD:
            correction = cute.math.exp2((row_max[r] - highest) * scale_log2, fastmath=True)
            row_max[r] = highest
            row_sum[r] = row_sum[r] * correction
            for j in cutlass.range_constexpr(cute.size(output) // 4):
                for c in cutlass.range_constexpr(2):
                    index = cutlass.const_expr(c + 2 * r + 4 * j)
                    output[index] = output[index] * correction
        _exponentiate_row(scores, row_max, row_sum, r, scale_log2)


@cute.jit
def online_softmax_deferred(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    # [ROWS] written: factor for `rescale_output`
    correction: cute.Tensor,
    scale_log2: Float32,
):
    """`online_softmax` without rescaling the output, into which a GEMM still accumulates."""
    for r in cutlass.range_constexpr(ROWS):
        highest = _highest(scores, row_max, r)
        correction[r] = Float32(1.0)
        if (highest - row_max[r]) * scale_log2 > RESCALE_THRESHOLD:
            correction[r] = cute.math.exp2((row_max[r] - highest) * scale_log2, fastmath=True)
            row_max[r] = highest
            row_sum[r] = row_sum[r] * correction[r]
        _exponentiate_row(scores, row_max, row_sum, r, scale_log2)


@cute.jit
def rescale_output(output: cute.Tensor, correction: cute.Tensor):
    """Multiplies the output by the factors of `online_softmax_deferred`; skips factors of 1."""
    for r in cutlass.range_constexpr(ROWS):
        if correction[r] != 1.0:
            for j in cutlass.range_constexpr(cute.size(output) // 4):
                for c in cutlass.range_constexpr(2):
                    index = cutlass.const_expr(c + 2 * r + 4 * j)
                    output[index] = output[index] * correction[r]


@cute.jit
def _highest(scores: cute.Tensor, row_max: cute.Tensor, r: cutlass.Constexpr) -> Float32:
    highest = row_max[r]
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for c in cutlass.range_constexpr(2):
            highest = cute.arch.fmax(highest, scores[c + 2 * r + 4 * j])
    return quad_max(highest)


@cute.jit
def _exponentiate_row(
    scores: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, r: cutlass.Constexpr,
    scale_log2: Float32,
):  # fmt: skip
    """Replaces the scores of a thread's row r by weights and adds these to its sum."""
    # -inf - -inf is NaN, so an empty row uses the reference 0.
    reference = Float32(0.0) if row_max[r] == -Float32.inf else row_max[r]
    shift = reference * scale_log2
    total = row_sum[r]
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for c in cutlass.range_constexpr(2):
            index = cutlass.const_expr(c + 2 * r + 4 * j)
            weight = cute.math.exp2(scores[index] * scale_log2 - shift, fastmath=True)
            scores[index] = weight
            total = total + weight
    row_sum[r] = total


@cute.jit
def row_of(thread: Int32, r: cutlass.Constexpr) -> Int32:
    """Returns the accumulator row of a warpgroup's thread."""
    return thread // 32 * 16 + thread % 32 // 4 + 8 * r
