# SPDX-License-Identifier: Apache-2.0
"""Tree attention over a paged cache in Triton: every CUDA device, and the CuTe kernel's twin.

Query heads of one KV head are packed into rows, so that a tile of K and V is read once for all of
them. The context is split among programs; a second kernel merges the splits. No mask is read over
the context: only the tree's own columns look at the ancestor words.

What a layer does beside that (`features.AttnFeatures`) is a variant of the kernel: code and
arguments of a feature are there only where a layer has it.

Letters: T query rows of the step, M tree rows, R trees, Hq/Hkv heads, Dh head size, W 64-bit words
a mask row, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .features import PLAIN, AttnFeatures
from .lse_merge_triton import merge_states
from .tree_words_triton import fill_tree_words

if TYPE_CHECKING:
    from .metadata import TreeAttnMetadata

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
# Longer windows leave out nothing, and would not fit in 32 bits beside a position.
_LONGEST_WINDOW = 2**30

# A split shorter than this costs more in merging than it saves.
MIN_SPLIT = 256
MAX_SPLITS = 64
_MAX_BLOCK_M = 128
MAX_HEAD_DIM = 256


@triton.jit
def _attend(
    q, k, v, shown, row_max, row_sum, acc, scale_log2, slope_log2, distance,
    MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the online softmax; `shown` [BLOCK_M, BLOCK_N] is read when MASKED, `distance`
    where there are slopes [BLOCK_M]."""
    scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
    if SOFT_CAP > 0:
        # tanh by an exponential that cannot overflow.
        small = tl.exp2(tl.abs(scores) * (-2.0 / SOFT_CAP))
        capped = (1.0 - small) / (1.0 + small) * (SOFT_CAP / LN_2)
        scores = tl.where(scores < 0.0, -capped, capped)
    if slope_log2 is not None:
        scores -= slope_log2[:, None] * distance
    if MASKED:
        scores = tl.where(shown, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row may see nothing of its first tile: then its maximum stays -inf, and -inf - -inf is NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return new_max, row_sum, acc


@triton.jit
def _depths(word_at, present, rows):
    """int32 [N]: how many rows of its own tree each mask row at `word_at` attends, but itself."""
    bits = tl.zeros(word_at.shape, tl.int64)
    for _ in range(0, rows, 64):
        # Bits in pairs, in fours, in eights, then their sum in the highest eight.
        x = tl.load(word_at, mask=present, other=0)
        x -= (x >> 1) & 0x5555555555555555
        x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
        bits += (x * 0x0101010101010101) >> 56
        word_at += 1
    return bits.to(tl.int32) - 1


# Numbers that change from step to step must not make new variants of the kernel.
_STEP_NUMBERS = [
    "num_splits",
    "plan_stride",
    "words_stride",
    "table_stride",
    "lse_split",
    "lse_row",
    "lse_head",
    "prefix_lse_head",
]


@triton.jit(do_not_specialize=_STEP_NUMBERS)
def _tree_attn_kernel(
    # [T, Hq, Dh]
    query,
    # [num_blocks, PAGE, Hkv, Dh] by strides
    key_cache,
    value_cache,
    # [T, Hq, Dh]; [S, M, Hq, Dh] float32 when split
    output,
    # [S, M, Hq] natural logarithms; read only when STORE_LSE
    lse,
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
    num_splits,
    plan_stride,
    words_stride,
    table_stride,
    query_row,
    query_head,
    output_split,
    output_row,
    output_head,
    lse_split,
    lse_row,
    lse_head,
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
    # [Hq] each, any float dtype; None without
    sinks,
    alibi_slopes,
    # float32, one or Hkv values by strides; None where they are 1
    query_scale,
    key_scale,
    value_scale,
    QUERY_SCALE_HEAD: tl.constexpr,
    KEY_SCALE_HEAD: tl.constexpr,
    VALUE_SCALE_HEAD: tl.constexpr,
    # 0 without
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    # whether it matters how far a key is from a row
    PLACED: tl.constexpr,
    # type of the products' factors, to which narrower queries and caches are widened
    COMPUTE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DENSE_TAIL: tl.constexpr,
    FULL_TAIL: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    STORE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tree = tl.program_id(2)
    head_kv = tl.program_id(1)
    split = tl.program_id(0) % num_splits
    first = tl.program_id(0) // num_splits * BLOCK_M
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
    if key_scale is not None:
        scale_log2 = scale_log2 * tl.load(key_scale + head_kv * KEY_SCALE_HEAD)
        if not DENSE_TAIL:
            tail_scale_log2 = scale_log2
    if alibi_slopes is not None:
        slope_log2 = tl.load(alibi_slopes + head).to(tl.float32) / LN_2
    else:
        slope_log2 = None
    if PLACED:
        tl.static_assert(not FULL_TAIL, "rows of a full mask have no depth")
        depth = _depths(words + (mask_start + row) * words_stride, valid, rows)
        row_position = context + depth

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    if HAS_PREFIX:
        # Softmax over the context as one column: its output, at the logit of its log-sum-exp.
        # Nothing is read where there is no context: FlashAttention then gives +inf or nothing.
        if context > 0:
            prefix_at = prefix + (row_start + row) * prefix_row + head * prefix_head
            acc = tl.load(prefix_at[:, None] + dims[None, :], mask=in_head[None, :], other=0.0).to(
                tl.float32
            )
            row_max = tl.load(prefix_lse + head * prefix_lse_head + row_start + row) / LN_2
            row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    if sinks is not None:
        # A column of the first split alone, or merging would count it again.
        sink = tl.load(sinks + head).to(tl.float32) / LN_2
        sink = tl.where(split == 0, sink, float("-inf"))
        new_max = tl.maximum(row_max, sink)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.exp2(sink - base)
        acc = acc * decay[:, None]
        row_max = new_max
    columns = tl.arange(0, BLOCK_N)
    everything = tl.full([BLOCK_M, BLOCK_N], True, tl.int1)
    key_base = key_cache + head_kv.to(tl.int64) * key_head
    value_base = value_cache + head_kv.to(tl.int64) * value_head

    # The context of this split: whole tiles first, without any mask, then the part of one.
    if WINDOW:
        # The root sees furthest back. Pages before may be another request's.
        lowest = tl.maximum(context - WINDOW + 1, 0)
        origin = tl.minimum(lowest // BLOCK_N * BLOCK_N, context)
        chunk = tl.cdiv(tl.cdiv(context - origin, num_splits), BLOCK_N) * BLOCK_N
        chunk = tl.maximum(chunk, MIN_SPLIT)
        begin = tl.minimum(origin + split * chunk, context)
    else:
        chunk = tl.cdiv(tl.cdiv(context, num_splits), BLOCK_N) * BLOCK_N
        chunk = tl.maximum(chunk, MIN_SPLIT)
        begin = tl.minimum(split * chunk, context)
    end = tl.minimum(begin + chunk, context)
    if HAS_PREFIX:
        end = begin
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N
    for start in range(begin, whole, BLOCK_N):
        if PAGE % BLOCK_N == 0:
            page = tl.load(table + start // PAGE).to(tl.int64)
            offset = start % PAGE + columns
            key_at = key_base + page * key_block + offset * key_token
            value_at = value_base + page * value_block + offset * value_token
        else:
            position = start + columns
            if WINDOW:
                pages = tl.load(table + position // PAGE, mask=position >= lowest, other=0)
                pages = pages.to(tl.int64)
            else:
                pages = tl.load(table + position // PAGE).to(tl.int64)
            key_at = key_base + pages * key_block + position % PAGE * key_token
            value_at = value_base + pages * value_block + position % PAGE * value_token
        if WINDOW:
            kept = start + columns >= lowest
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
        if PLACED:
            distance = row_position[:, None] - (start + columns)[None, :]
        else:
            distance = None
        if WINDOW:
            shown = distance < WINDOW
        else:
            shown = everything
        row_max, row_sum, acc = _attend(
            q, k.to(COMPUTE), v.to(COMPUTE), shown, row_max, row_sum, acc, scale_log2, slope_log2,
            distance, WINDOW > 0, SOFT_CAP, PRECISION,
        )  # fmt: skip
    if whole < end:
        position = whole + columns
        present = position < end
        if WINDOW:
            present = present & (position >= lowest)
        pages = tl.load(table + position // PAGE, mask=present, other=0).to(tl.int64)
        key_at = key_base + pages * key_block + position % PAGE * key_token
        value_at = value_base + pages * value_block + position % PAGE * value_token
        # Slots past the context may hold anything, NaN too: they are not read.
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
        shown = present[None, :]
        if PLACED:
            distance = row_position[:, None] - position[None, :]
        else:
            distance = None
        if WINDOW:
            shown = shown & (distance < WINDOW)
        row_max, row_sum, acc = _attend(
            q, k.to(COMPUTE), v.to(COMPUTE), shown, row_max, row_sum, acc, scale_log2, slope_log2,
            distance, True, SOFT_CAP, PRECISION,
        )  # fmt: skip
    if value_scale is not None:
        scale_of_values = tl.load(value_scale + head_kv * VALUE_SCALE_HEAD)
        if DENSE_TAIL:
            acc = acc * scale_of_values

    # The tree's own columns go to the first split, which always exists.
    if split == 0:
        word_at = words + (mask_start + row) * words_stride
        for start in range(0, rows, BLOCK_N):
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
                key_at = key_base + pages * key_block + position % PAGE * key_token
                value_at = value_base + pages * value_block + position % PAGE * value_token
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
            if FULL_TAIL:
                shown = everything & present[None, :]
            else:
                # BLOCK_N divides 64: the columns of a tile share one word of a row.
                word = tl.load(word_at + start // 64)
                bit = (start % 64 + columns).to(tl.int64)
                shown = (((word[:, None] >> bit[None, :]) & 1) == 1) & present[None, :]
            if PLACED:
                # Whatever its place in the tree, a row is as far behind as it is less deep.
                other = _depths(words + (mask_start + column) * words_stride, present, rows)
                distance = depth[:, None] - other[None, :]
            else:
                distance = None
            if WINDOW:
                shown = shown & (distance < WINDOW)
            row_max, row_sum, acc = _attend(
                q, k.to(COMPUTE), v.to(COMPUTE), shown, row_max, row_sum, acc, tail_scale_log2,
                slope_log2, distance, True, SOFT_CAP, PRECISION,
            )  # fmt: skip

    if SPLIT:
        to_row = mask_start + row
    else:
        to_row = row_start + row
    # A split without any context leaves only its -inf behind; the merge does not read the rest.
    if (split == 0) | (begin < end):
        acc = acc / row_sum[:, None]
        if value_scale is not None and not DENSE_TAIL:
            acc = acc * scale_of_values
        at = output + split.to(tl.int64) * output_split + to_row * output_row + head * output_head
        tl.store(
            at[:, None] + dims[None, :],
            acc.to(output.dtype.element_ty),
            mask=valid[:, None] & in_head[None, :],
        )
    if STORE_LSE:
        value = (row_max + tl.log2(tl.where(row_sum > 0.0, row_sum, 1.0))) * LN_2
        lse_at = lse + split.to(tl.int64) * lse_split + to_row * lse_row + head * lse_head
        tl.store(lse_at, value, mask=valid)


@dataclass(frozen=True)
class TreeAttnConfig:
    """Tile sizes of one launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(
        cls,
        packed_rows: int,
        head_dim: int,
        itemsize: int,
        shared_memory: int,
        major: int = 9,
        dense: bool = False,
    ) -> TreeAttnConfig:
        """Tiles for `packed_rows` rows x heads of the largest tree on a device of compute
        capability `major` whose blocks may take `shared_memory` bytes; with `dense` tails."""
        # Few sizes: each is a compilation.
        block_m = 16 if packed_rows <= 16 else 64 if packed_rows <= 64 or itemsize == 4 else 128
        block_n = 64 if itemsize < 4 else 32
        if head_dim > 128 or major < 9:
            # Ampere's tiles of a wide head: more rows spill even with eight warps.
            block_m, block_n = min(block_m, 32 if head_dim > 128 and major < 9 else 64), 32
        if dense and major >= 10:
            block_m = min(block_m, 64)
        # K and V of a tile per stage, and the query once.
        padded = triton.next_power_of_2(head_dim)
        stage = 2 * block_n * padded * itemsize
        stages = (shared_memory - block_m * padded * itemsize - 8192) // stage
        # With fewer warps the accumulator spills: a warpgroup of Hopper holds 64 rows, four warps
        # before it only 32. On Blackwell it lies in registers between two products.
        wide = block_m > (64 if major >= 9 else 32)
        # A dense tail adds addresses, which spill too: with four warps, and with three stages.
        if block_m == 64 and dense + (head_dim > 128) + (major >= 10) >= 2:
            wide = True
        if block_m == 32:
            wide = True
        deepest = 3 if not dense else 2 if head_dim <= 128 or block_m > 16 else 1
        return cls(block_m, block_n, 8 if wide else 4, int(max(1, min(deepest, stages))))


def config_for(
    device: torch.device, packed_rows: int, head_dim: int, itemsize: int, dense: bool = False
) -> TreeAttnConfig:
    """`TreeAttnConfig.choose` for a device."""
    _, shared_memory, major = _device_limits(device)
    return TreeAttnConfig.choose(packed_rows, head_dim, itemsize, shared_memory, major, dense)


def choose_splits(programs: int, max_context: int, num_sms: int) -> int:
    """Splits of the context so that about two programs stand on every multiprocessor.

    Args:
        programs: programs without a split.
        max_context: longest context; shares shorter than MIN_SPLIT are not worth merging.
        num_sms: multiprocessors of the device.
    """
    useful = max(1, max_context // MIN_SPLIT)
    wanted = -(-2 * num_sms // max(1, programs))
    return max(1, min(useful, wanted, MAX_SPLITS))


def most_workspace_bytes(device: torch.device) -> int:
    """Most bytes that one call of `tree_attn_triton` allocates besides its output.

    A context is split only where there are fewer programs than two a multiprocessor, and into
    fewer than would make four.
    """
    programs = 4 * _device_limits(device)[0]
    row = MAX_HEAD_DIM * 4 + 4
    return programs * _MAX_BLOCK_M * row


def tree_attn_triton(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, block_size, Hkv, Dh], any strides
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None = None,
    tail_value: torch.Tensor | None = None,
    *,
    features: AttnFeatures = PLAIN,
    # [T, Hq] float32, any strides; written for tree rows
    lse: torch.Tensor | None = None,
    splits: int | None = None,
    # [T, Hq, Dh] and [Hq, T] float32
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Tree attention as `cuda_contract` states it. No host synchronisation, graph safe.

    Args:
        lse: takes the natural logarithm of each row's softmax sum, when given.
        splits: forces the number of context splits.
        prefix: attention over the context and its log-sum-exp, when another kernel has computed
            them; this one then reads the tree's own columns alone. Rows without a context may hold
            anything. It knows nothing of sinks, which are added here; a window, slopes or scales
            cannot come with it.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert query.stride(2) == 1 and output.stride(2) == 1, (query.stride(), output.stride())
    if meta.num_trees == 0 or meta.max_rows == 0:
        return
    group = num_heads // num_kv_heads
    quantised = features.key_scales is not None
    assert quantised or query.dtype == key_cache.dtype, (query.dtype, key_cache.dtype)
    assert prefix is None or not (features.needs_positions or quantised)
    compute = output.dtype if quantised else query.dtype
    window = min(features.window, _LONGEST_WINDOW)
    num_sms = _device_limits(query.device)[0]
    dense = tail_key is not None
    config = config_for(query.device, meta.max_rows * group, head_dim, query.element_size(), dense)
    row_tiles = triton.cdiv(meta.max_rows * group, config.block_m)
    if prefix is not None:
        splits = 1
    elif splits is None:
        attended = min(meta.max_context, window) if window else meta.max_context
        splits = choose_splits(row_tiles * num_kv_heads * meta.num_trees, attended, num_sms)
    if splits == 1:
        target, target_lse = output, lse
        target_strides = (0, output.stride(0), output.stride(1))
    else:
        # An even number: strides are then multiples of 16 for every head size that is one of 8, and
        # a step's rows make no new variant.
        rows = -(-meta.num_rows // 2) * 2
        target = query.new_empty((splits, rows, num_heads, head_dim), dtype=torch.float32)
        target_lse = query.new_empty((splits, rows, num_heads), dtype=torch.float32)
        target_strides = target.stride()[:3]
    lse_strides = (0, 0, 0)
    if target_lse is not None:
        lse_strides = (0, *target_lse.stride()) if splits == 1 else target_lse.stride()
    full = meta.mask_kind == "full"
    words = meta.plan if full else tree_words(meta)
    tail_strides = (0, 0, 0, 0)
    if dense:
        assert tail_value is not None
        assert tail_key.stride(2) == 1 and tail_value.stride(2) == 1
        tail_strides = (*tail_key.stride()[:2], *tail_value.stride()[:2])
    context_out, context_lse = (query, query) if prefix is None else prefix
    prefix_strides = (*context_out.stride()[:2], context_lse.stride(0))
    assert prefix is None or (context_out.stride(2) == 1 and context_lse.stride(1) == 1)
    _tree_attn_kernel[(row_tiles * splits, num_kv_heads, meta.num_trees)](
        query,
        key_cache,
        value_cache,
        target,
        target if target_lse is None else target_lse,
        meta.plan,
        words,
        meta.block_table,
        tail_key if dense else query,
        tail_value if dense else query,
        context_out,
        context_lse,
        scale * LOG2_E,
        splits,
        meta.plan.stride(0),
        words.stride(0),
        meta.block_table.stride(0),
        query.stride(0),
        query.stride(1),
        *target_strides,
        *lse_strides,
        *key_cache.stride(),
        *value_cache.stride(),
        *tail_strides,
        *prefix_strides,
        features.sinks,
        features.alibi_slopes,
        features.query_scales,
        features.key_scales,
        features.value_scales,
        QUERY_SCALE_HEAD=_head_stride(features.query_scales),
        KEY_SCALE_HEAD=_head_stride(features.key_scales),
        VALUE_SCALE_HEAD=_head_stride(features.value_scales),
        WINDOW=window,
        SOFT_CAP=features.soft_cap,
        PLACED=features.needs_positions,
        COMPUTE=_TRITON_TYPES[compute],
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        PAGE=key_cache.shape[1],
        SPLIT=splits > 1,
        MIN_SPLIT=MIN_SPLIT,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        DENSE_TAIL=dense,
        FULL_TAIL=full,
        HAS_PREFIX=prefix is not None,
        STORE_LSE=target_lse is not None,
        PRECISION="ieee" if compute == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        merge_states(
            target, target_lse, output, plan=meta.plan, max_rows=meta.max_rows, merged_lse=lse
        )


_TRITON_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def _head_stride(scale: torch.Tensor | None) -> int:
    """From one head's scale to the next's; 0 where all share one."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def tree_words(meta: TreeAttnMetadata) -> torch.Tensor:
    """The ancestor words of `meta` [M, W]; made and kept there if the caller did not bring any."""
    if meta.mask_words is None:
        width = max(1, triton.cdiv(meta.max_rows, 64))
        shape = (meta.num_rows, width)
        meta.mask_words = torch.zeros(shape, dtype=torch.int64, device=meta.plan.device)
        fill_tree_words(meta.plan, meta.parent_rows, meta.mask_words, meta.max_rows)
    return meta.mask_words


_LIMITS: dict[torch.device, tuple[int, int, int]] = {}


def _device_limits(device: torch.device) -> tuple[int, int, int]:
    """Multiprocessors, bytes of shared memory a block may take, major compute capability."""
    if device not in _LIMITS:
        if device.type != "cuda":
            # The interpreter: any values do.
            _LIMITS[device] = (8, 227 * 1024, 9)
        else:
            properties = torch.cuda.get_device_properties(device)
            _LIMITS[device] = (
                properties.multi_processor_count,
                properties.shared_memory_per_block_optin,
                properties.major,
            )
    return _LIMITS[device]
