# SPDX-License-Identifier: Apache-2.0
"""The kernel of `tree_attn_triton`.

Features of a layer (`features.AttnFeatures`) make variants of it, with code and arguments only for
these features. Letters as in `tree_attn_triton`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tree_parts_triton import TILE, context_tiles, part_of_slot

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(
    q, k, v, shown, row_max, row_sum, acc, scale_log2, slope_log2, distance, key_scales,
    value_scales, MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Processes a tile of the online softmax. `shown` [BLOCK_M, BLOCK_N] is read when MASKED,
    `distance` with slopes [BLOCK_M]. Scales [BLOCK_N] are per slot, or None."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    if key_scales is None:
        scores *= scale_log2
    else:
        scores *= (key_scales * scale_log2)[None, :]
    if SOFT_CAP > 0:
        # tanh by an exponential that cannot overflow.
        small = tl.exp2(tl.abs(scores) * (-2.0 / SOFT_CAP))
        capped = (1.0 - small) / (1.0 + small) * (SOFT_CAP / LN_2)
        scores = tl.where(scores < 0.0, -capped, capped)
    if slope_log2 is not None:
        scores -= slope_log2[:, None] * distance
    return add_columns(scores, v, shown, row_max, row_sum, acc, value_scales, MASKED, PRECISION)


@triton.jit
def add_columns(
    scores, v, shown, row_max, row_sum, acc, value_scales, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds columns with base-2 `scores` and values `v` to the state of the online softmax."""
    if MASKED:
        scores = tl.where(shown, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # If a row attends nothing of its first tile, its maximum stays -inf, and -inf - -inf is NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    if value_scales is not None:
        weights *= value_scales[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return new_max, row_sum, acc


@triton.jit
def _depths(word_at, present, rows):
    """Returns int32 [N]: the number of other rows of its tree that each mask row at `word_at`
    attends."""
    bits = tl.zeros(word_at.shape, tl.int64)
    for _ in range(0, rows, 64):
        # Counts of bits in pairs, in fours, in eights, and their sum in the highest eight.
        x = tl.load(word_at, mask=present, other=0)
        x -= (x >> 1) & 0x5555555555555555
        x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
        bits += (x * 0x0101010101010101) >> 56
        word_at += 1
    return bits.to(tl.int32) - 1


@triton.jit
def _slot_scales(
    key_scale, value_scale, pages, in_page, head_kv, mask,
    BLOCK: tl.constexpr, TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr,
):  # fmt: skip
    """Returns the factors of keys and values of `in_page` [N] of `pages`, float32 [N] each."""
    at = pages * BLOCK + in_page * TOKEN
    key_at = key_scale + head_kv * KEY_HEAD + at
    value_at = value_scale + head_kv * VALUE_HEAD + at
    if mask is None:
        keys = tl.load(key_at)
        values = tl.load(value_at)
    else:
        keys = tl.load(key_at, mask=mask, other=0.0)
        values = tl.load(value_at, mask=mask, other=0.0)
    return keys, values


# Arguments that change between steps must not make new variants of the kernel.
_STEP_NUMBERS = [
    "num_trees",
    "forced_parts",
    "resident_ctas",
    "extra",
    "plan_stride",
    "words_stride",
    "table_stride",
    "part_rows",
    "prefix_lse_head",
]


@triton.jit(do_not_specialize=_STEP_NUMBERS)
def _tree_attn_kernel(
    # [T, Hq, Dh]
    query,
    # [num_blocks, PAGE, Hkv, Dh] by strides
    key_cache,
    value_cache,
    # [T, Hq, Dh]
    output,
    # [parts, part_rows, Hq, Dh] and [parts, part_rows, Hq] float32, and [R, 2] int32: slot of a
    # tree's first part and number of its parts; all written, when SPLIT
    part_out,
    part_lse,
    part_record,
    # [5, R] int32: request, first query row, rows, context length, first mask row
    plan,
    # [M, W] int64; not read when FULL_TAIL
    words,
    # [B, max_blocks] int32
    block_table,
    # [M, Hkv, Dh] when DENSE_TAIL
    tail_key,
    tail_value,
    # attention over the context [T, Hq, Dh] and its natural log-sum-exp [Hq, T], when HAS_PREFIX
    prefix,
    prefix_lse,
    scale_log2,
    num_trees,
    # the schedule of a launch when SPLIT, see `part_of_slot`
    forced_parts,
    resident_ctas,
    extra,
    part_rows,
    plan_stride,
    words_stride,
    table_stride,
    query_row,
    query_head,
    output_row,
    output_head,
    key_block,
    key_token,
    key_head,
    key_dim,
    value_block,
    value_token,
    value_head,
    value_dim,
    tail_key_row,
    tail_key_head,
    tail_value_row,
    tail_value_head,
    prefix_row,
    prefix_head,
    prefix_lse_head,
    # [Hq] each, any float dtype, or None
    sinks,
    alibi_slopes,
    # float32, one or Hkv values by strides; None for 1. If SCALE_TOKEN is not 0, scales of keys and
    # values are per slot and head
    query_scale,
    key_scale,
    value_scale,
    QUERY_SCALE_HEAD: tl.constexpr,
    KEY_SCALE_HEAD: tl.constexpr,
    VALUE_SCALE_HEAD: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SCALE_TOKEN: tl.constexpr,
    # then also from a key to its value
    VALUE_AT: tl.constexpr,
    # 0 without
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    # whether it matters how far a key is from a row
    NEEDS_POSITIONS: tl.constexpr,
    # dtype of the products' factors, to which narrower queries and caches are converted
    COMPUTE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DENSE_TAIL: tl.constexpr,
    FULL_TAIL: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slot = tl.program_id(2)
    head_kv = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_M
    if SPLIT:
        tree, part, parts = part_of_slot(
            plan, plan_stride, num_trees, forced_parts, resident_ctas, extra, tl.num_programs(1),
            slot, WINDOW, GROUP, BLOCK_M,
        )  # fmt: skip
        if tree < 0:
            return
        if (part == 0) & (head_kv == 0) & (first == 0):
            tl.store(part_record + 2 * tree, slot)
            tl.store(part_record + 2 * tree + 1, parts)
    else:
        tree = slot
        part = 0
        parts = 1
    rows = tl.load(plan + 2 * plan_stride + tree)
    if first >= rows * GROUP:
        return
    request = tl.load(plan + tree).to(tl.int64)
    row_start = tl.load(plan + plan_stride + tree).to(tl.int64)
    context = tl.load(plan + 3 * plan_stride + tree)
    mask_start = tl.load(plan + 4 * plan_stride + tree).to(tl.int64)
    table = block_table + request * table_stride

    packed = first + tl.arange(0, BLOCK_M)
    valid = packed < rows * GROUP
    # Rows past the end work on the last row, which keeps every softmax finite without a mask.
    row = tl.minimum(packed // GROUP, rows - 1)
    head = head_kv * GROUP + packed % GROUP
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    query_at = query + (row_start + row) * query_row + head * query_head
    if PADDED_DIM == HEAD_DIM:
        q = tl.load(query_at[:, None] + dims[None, :])
    else:
        q = tl.load(query_at[:, None] + dims[None, :], mask=in_head[None, :], other=0.0)
    q = q.to(COMPUTE)
    if query_scale is not None:
        scale_log2 = scale_log2 * tl.load(query_scale + head_kv * QUERY_SCALE_HEAD)
    # A dense tail is not quantised.
    tail_scale_log2 = scale_log2
    if key_scale is not None and not SCALE_TOKEN:
        scale_log2 = scale_log2 * tl.load(key_scale + head_kv * KEY_SCALE_HEAD)
        if not DENSE_TAIL:
            tail_scale_log2 = scale_log2
    if alibi_slopes is not None:
        slope_log2 = tl.load(alibi_slopes + head).to(tl.float32) / LN_2
    else:
        slope_log2 = None
    if NEEDS_POSITIONS:
        if FULL_TAIL:
            depth = row
        else:
            depth = _depths(words + (mask_start + row) * words_stride, valid, rows)
        row_position = context + depth

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    if HAS_PREFIX:
        # Softmax over the context as one column: its output, at the logit of its log-sum-exp.
        # It is not read without a context: FlashAttention then writes +inf or nothing.
        if context > 0:
            prefix_at = prefix + (row_start + row) * prefix_row + head * prefix_head
            acc = tl.load(prefix_at[:, None] + dims[None, :], mask=in_head[None, :], other=0.0).to(
                tl.float32
            )
            row_max = tl.load(prefix_lse + head * prefix_lse_head + row_start + row) / LN_2
            row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    if sinks is not None:
        # A column of the first part only, because merging would count it again.
        sink = tl.load(sinks + head).to(tl.float32) / LN_2
        if SPLIT:
            sink = tl.where(part == 0, sink, float("-inf"))
        new_max = tl.maximum(row_max, sink)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.exp2(sink - base)
        acc = acc * decay[:, None]
        row_max = new_max
    columns = tl.arange(0, BLOCK_N)
    everything = tl.full([BLOCK_M, BLOCK_N], True, tl.int1)
    if SCALE_TOKEN:
        # Tells the compiler that offsets are multiples of a scale's size; otherwise it reads bytes.
        value_cache = key_cache + VALUE_AT
        key_block = SCALE_BLOCK * 4
        key_token = SCALE_TOKEN * 4
        key_head = KEY_SCALE_HEAD * 4
        value_block = key_block
        value_token = key_token
        value_head = key_head
    key_base = key_cache + head_kv.to(tl.int64) * key_head
    value_base = value_cache + head_kv.to(tl.int64) * value_head

    # The context of this part: full tiles without a mask, then a partial tile.
    if WINDOW:
        lowest = tl.maximum(context - WINDOW + 1, 0)
        begin = tl.minimum(lowest // BLOCK_N * BLOCK_N, context)
    else:
        begin = context * 0
    end = context
    tail_begin = context * 0
    tail_end = rows
    if SPLIT:
        # A tree has tiles of its context, then tiles of its own columns.
        origin, in_context = context_tiles(context, WINDOW)
        tiles = in_context + tl.cdiv(rows, TILE)
        first_tile = tiles * part // parts
        end_tile = tiles * (part + 1) // parts
        begin = tl.maximum(begin, tl.minimum(origin + first_tile * TILE, context))
        end = tl.minimum(origin + end_tile * TILE, context)
        tail_begin = tl.maximum(first_tile - in_context, 0) * TILE
        tail_end = tl.minimum((end_tile - in_context) * TILE, rows)
    if HAS_PREFIX:
        end = begin
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N
    for start in range(begin, whole, BLOCK_N):
        if PAGE % BLOCK_N == 0:
            pages = tl.load(table + start // PAGE).to(tl.int64)
            in_page = start % PAGE + columns
        else:
            position = start + columns
            if WINDOW:
                pages = tl.load(table + position // PAGE, mask=position >= lowest, other=0)
                pages = pages.to(tl.int64)
            else:
                pages = tl.load(table + position // PAGE).to(tl.int64)
            in_page = position % PAGE
        key_at = key_base + pages * key_block + in_page * key_token
        value_at = value_base + pages * value_block + in_page * value_token
        if WINDOW:
            kept = start + columns >= lowest
        else:
            kept = None
        if WINDOW:
            k = tl.load(
                key_at[None, :] + dims[:, None] * key_dim,
                mask=kept[None, :] & in_head[:, None],
                other=0.0,
            )
            v = tl.load(
                value_at[:, None] + dims[None, :] * value_dim,
                mask=kept[:, None] & in_head[None, :],
                other=0.0,
            )
        elif PADDED_DIM == HEAD_DIM:
            k = tl.load(key_at[None, :] + dims[:, None] * key_dim)
            v = tl.load(value_at[:, None] + dims[None, :] * value_dim)
        else:
            k = tl.load(key_at[None, :] + dims[:, None] * key_dim, mask=in_head[:, None], other=0.0)
            v = tl.load(
                value_at[:, None] + dims[None, :] * value_dim, mask=in_head[None, :], other=0.0
            )
        if SCALE_TOKEN:
            key_scales, value_scales = _slot_scales(
                key_scale, value_scale, pages, in_page, head_kv, kept,
                SCALE_BLOCK, SCALE_TOKEN, KEY_SCALE_HEAD, VALUE_SCALE_HEAD,
            )  # fmt: skip
        else:
            key_scales = None
            value_scales = None
        if NEEDS_POSITIONS:
            distance = row_position[:, None] - (start + columns)[None, :]
        else:
            distance = None
        if WINDOW:
            shown = distance < WINDOW
        else:
            shown = everything
        row_max, row_sum, acc = _attend(
            q, k.to(COMPUTE), v.to(COMPUTE), shown, row_max, row_sum, acc, scale_log2, slope_log2,
            distance, key_scales, value_scales, WINDOW > 0, SOFT_CAP, PRECISION,
        )  # fmt: skip
    if whole < end:
        position = whole + columns
        present = position < end
        if WINDOW:
            present = present & (position >= lowest)
        pages = tl.load(table + position // PAGE, mask=present, other=0).to(tl.int64)
        in_page = position % PAGE
        key_at = key_base + pages * key_block + in_page * key_token
        value_at = value_base + pages * value_block + in_page * value_token
        # Slots past the context may be NaN and are not read.
        k = tl.load(
            key_at[None, :] + dims[:, None] * key_dim,
            mask=present[None, :] & in_head[:, None],
            other=0.0,
        )
        v = tl.load(
            value_at[:, None] + dims[None, :] * value_dim,
            mask=present[:, None] & in_head[None, :],
            other=0.0,
        )
        if SCALE_TOKEN:
            key_scales, value_scales = _slot_scales(
                key_scale, value_scale, pages, in_page, head_kv, present,
                SCALE_BLOCK, SCALE_TOKEN, KEY_SCALE_HEAD, VALUE_SCALE_HEAD,
            )  # fmt: skip
        else:
            key_scales = None
            value_scales = None
        shown = present[None, :]
        if NEEDS_POSITIONS:
            distance = row_position[:, None] - position[None, :]
        else:
            distance = None
        if WINDOW:
            shown = shown & (distance < WINDOW)
        row_max, row_sum, acc = _attend(
            q, k.to(COMPUTE), v.to(COMPUTE), shown, row_max, row_sum, acc, scale_log2, slope_log2,
            distance, key_scales, value_scales, True, SOFT_CAP, PRECISION,
        )  # fmt: skip
    if value_scale is not None and not SCALE_TOKEN:
        scale_of_values = tl.load(value_scale + head_kv * VALUE_SCALE_HEAD)
        if DENSE_TAIL:
            acc = acc * scale_of_values

    if tail_begin < tail_end:
        word_at = words + (mask_start + row) * words_stride
        for start in range(tail_begin, tail_end, BLOCK_N):
            column = start + columns
            present = column < rows
            if DENSE_TAIL:
                tail_row = mask_start + column
                key_at = tail_key + tail_row * tail_key_row + head_kv * tail_key_head
                value_at = tail_value + tail_row * tail_value_row + head_kv * tail_value_head
                key_step = 1
                value_step = 1
            else:
                position = context + column
                pages = tl.load(table + position // PAGE, mask=present, other=0).to(tl.int64)
                in_page = position % PAGE
                key_at = key_base + pages * key_block + in_page * key_token
                value_at = value_base + pages * value_block + in_page * value_token
                key_step = key_dim
                value_step = value_dim
            k = tl.load(
                key_at[None, :] + dims[:, None] * key_step,
                mask=present[None, :] & in_head[:, None],
                other=0.0,
            )
            v = tl.load(
                value_at[:, None] + dims[None, :] * value_step,
                mask=present[:, None] & in_head[None, :],
                other=0.0,
            )
            if SCALE_TOKEN and not DENSE_TAIL:
                key_scales, value_scales = _slot_scales(
                    key_scale, value_scale, pages, in_page, head_kv, present,
                    SCALE_BLOCK, SCALE_TOKEN, KEY_SCALE_HEAD, VALUE_SCALE_HEAD,
                )  # fmt: skip
            else:
                key_scales = None
                value_scales = None
            if FULL_TAIL:
                shown = everything & present[None, :]
            else:
                # BLOCK_N divides 64: the columns of a tile share one word of a row.
                word = tl.load(word_at + start // 64)
                bit = (start % 64 + columns).to(tl.int64)
                shown = (((word[:, None] >> bit[None, :]) & 1) == 1) & present[None, :]
            if NEEDS_POSITIONS:
                # The distance of a row to an ancestor is the difference of their depths.
                if FULL_TAIL:
                    other = column
                else:
                    other = _depths(words + (mask_start + column) * words_stride, present, rows)
                distance = depth[:, None] - other[None, :]
            else:
                distance = None
            if WINDOW:
                shown = shown & (distance < WINDOW)
            row_max, row_sum, acc = _attend(
                q, k.to(COMPUTE), v.to(COMPUTE), shown, row_max, row_sum, acc, tail_scale_log2,
                slope_log2, distance, key_scales, value_scales, True, SOFT_CAP, PRECISION,
            )  # fmt: skip

    # A part may have none of a row's columns. It writes -inf, and its output is not read.
    acc = acc / row_sum[:, None]
    if value_scale is not None and not SCALE_TOKEN and not DENSE_TAIL:
        acc = acc * scale_of_values
    if SPLIT and parts > 1:
        logarithm = (row_max + tl.log2(tl.where(row_sum > 0.0, row_sum, 1.0))) * LN_2
        num_heads = tl.num_programs(1) * GROUP
        part_row = (slot.to(tl.int64) * part_rows + row) * num_heads + head
        part_at = part_out + part_row * HEAD_DIM
        tl.store(part_at[:, None] + dims[None, :], acc, mask=valid[:, None] & in_head[None, :])
        tl.store(part_lse + part_row, logarithm, mask=valid)
    else:
        to_row = row_start + row
        at = output + to_row * output_row + head * output_head
        tl.store(
            at[:, None] + dims[None, :],
            acc.to(output.dtype.element_ty),
            mask=valid[:, None] & in_head[None, :],
        )
