# SPDX-License-Identifier: Apache-2.0
"""Online softmax on the accumulator of one warpgroup, and the layout of that accumulator.

A wgmma accumulator m64nN holds in thread t of the warpgroup, at flat index c + 2 * r + 4 * j,
row 16 * (t // 32) + (t % 32) // 4 + 8 * r and column 8 * j + 2 * (t % 4) + c. A row lies in the
four threads of a quad. Sixteen columns in a row of this order are one register operand of the
next wgmma, so probabilities become its A operand without a shuffle.

Sums are kept in base two: weights are exp2((score - max) * scale * log2(e)).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

ROWS = 2  # rows of one thread
# In powers of two: sums of weights stay far inside float32, weights inside float16.
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
    """Scores of a thread's row r become -inf where the window's bit is clear."""
    own = window >> Uint64(2 * (lane % 4))
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for c in cutlass.range_constexpr(2):
            index = cutlass.const_expr(c + 2 * r + 4 * j)
            bit = (own >> Uint64(8 * j + c)) & Uint64(1)
            scores[index] = scores[index] if bit == 1 else -Float32.inf


@cute.jit
def scale_scores(scores: cute.Tensor, scale_log2: Float32):
    """Scores in base two, for what comes before the softmax; that then takes a scale of 1."""
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = scores[i] * scale_log2


@cute.jit
def cap_scores(scores: cute.Tensor, cap_in: Float32, cap_out: Float32):
    """Scores s in base two become cap * tanh(s / cap); see `launch_params` for the two numbers.

    tanh x is 2 / (1 + exp(-2 x)) - 1, which takes one register a score, and there are no others: an
    exponential that overflows has the reciprocal 0, and -1 is right.
    """
    twice = cap_out * 2.0
    for i in cutlass.range_constexpr(cute.size(scores)):
        exponential = cute.math.exp2(scores[i] * cap_in, fastmath=True)
        scores[i] = cute.arch.rcp_approx(1.0 + exponential) * twice - cap_out


@cute.jit
def apply_alibi(
    scores: cute.Tensor, r: cutlass.Constexpr, slope: Float32, distance: Int32, lane: Int32
):
    """Scores of a thread's row r of a tile of context, whose column 0 is `distance` behind it."""
    own = distance - 2 * (lane % 4)
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for c in cutlass.range_constexpr(2):
            index = cutlass.const_expr(c + 2 * r + 4 * j)
            scores[index] = scores[index] - slope * Float32(own - (8 * j + c))


@cute.jit
def apply_alibi_tail(
    scores: cute.Tensor,
    r: cutlass.Constexpr,
    slope: Float32,
    # attended columns of the tile, and how many are attended after it
    bits: Uint64,
    after: Int32,
    lane: Int32,
):
    """Scores of a thread's row r of a masked tile; columns out of sight may get anything."""
    own = bits >> Uint64(2 * (lane % 4))
    # Halves: shifts of 64 bits take twice the registers, of which there are none to spare.
    low, high = Uint32(own & Uint64(0xFFFFFFFF)), Uint32(own >> Uint64(32))
    behind = after - 1
    behind_low = behind + Int32(cute.arch.popc(high))
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for c in cutlass.range_constexpr(2):
            index = cutlass.const_expr(c + 2 * r + 4 * j)
            if cutlass.const_expr(8 * j < 32):
                distance = behind_low + Int32(cute.arch.popc(low >> Uint32(8 * j + c)))
            else:
                distance = behind + Int32(cute.arch.popc(high >> Uint32(8 * j + c - 32)))
            scores[index] = scores[index] - slope * Float32(distance)


@cute.jit
def online_softmax(
    # accumulator of the scores; becomes the weights
    scores: cute.Tensor,
    # accumulator of the output; rescaled
    output: cute.Tensor,
    # [ROWS] the score that weights are measured against, a running maximum with slack, and this
    # thread's part of the running sum
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    scale_log2: Float32,
):
    """Takes one tile into the running maximum and sum. A row without a column so far stays 0.

    The maximum follows only when a score passes it by more than RESCALE_THRESHOLD: until then weights up
    to 2 ** RESCALE_THRESHOLD are as exact, in 16 bits too, and the output need not be rescaled, which
    would be an eighth of all instructions.
    """
    for r in cutlass.range_constexpr(ROWS):
        highest = _highest(scores, row_max, r)
        # True of a first column too: anything less -inf is inf. Not of an empty row: NaN.
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
    # [ROWS] becomes what the output is to be multiplied by, see `rescale_output`
    correction: cute.Tensor,
    scale_log2: Float32,
):
    """`online_softmax` while a product still adds to the output, which is left as it is."""
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
    """The output's rows by what `online_softmax_deferred` left; nothing is done to a row that is to stay."""
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
    """Scores of a thread's row r become weights, which enter its sum."""
    # -inf less -inf is NaN, so an empty row is measured against 0.
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
    """Accumulator row of a warpgroup's thread."""
    return thread // 32 * 16 + thread % 32 // 4 + 8 * r
