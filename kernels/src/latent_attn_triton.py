# SPDX-License-Identifier: Apache-2.0
"""Tree attention over a paged cache of latent rows (multi-head latent attention, absorbed) in
Triton.

A cache row is the key of every head, and its first L numbers are the value; see `latent_spans`. So
the heads of all rows of a tree are packed, and a tile of the cache is read once as keys and values.
Trees are split by their length as in `tree_attn_triton`, and their parts are merged by
`lse_merge_triton`. Only the tree's own columns use the ancestor words.

Letters: T query rows of the step, R trees, H heads, L latent numbers, P numbers of the rotary key,
W 64-bit words per mask row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from .latent_spans import LatentSpan, latent_attn
from .lse_merge_triton import merge_parts
from .masks import ancestor_words, words_to_bool
from .metadata import tree_metadata
from .tree_attn_triton import (
    LOG2_E,
    TreeAttnConfig,
    _device_limits,
    grid_split_of,
    resident_ctas_of,
    tree_words,
)
from .tree_attn_triton_kernel import LN_2, add_columns
from .tree_parts_triton import TILE, part_of_slot

if TYPE_CHECKING:
    from .metadata import TreeAttnMetadata

# Arguments that change between steps must not make new variants of the kernel.
_STEP_NUMBERS = [
    "num_trees",
    "forced_parts",
    "resident_ctas",
    "extra",
    "part_rows",
    "plan_stride",
    "words_stride",
    "table_stride",
]


def choose_config(packed_rows: int, itemsize: int) -> TreeAttnConfig:
    """Returns the tiles for `packed_rows` rows x heads of the largest tree. Tiles of 64 rows, or
    fewer stages, spill."""
    if itemsize == 4:
        return TreeAttnConfig(16, 16, 8, 3)
    return TreeAttnConfig(16 if packed_rows <= 16 else 32, 32, 8, 3)


@triton.jit
def _attend_rows(
    q_latent, q_rotary, cache, row_at, present, shown, row_max, row_sum, acc, scale_log2,
    LATENT: tl.constexpr, PADDED_LATENT: tl.constexpr,
    ROTARY: tl.constexpr, PADDED_ROTARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the cache rows at offsets `row_at` [BLOCK_N] to the state of the online softmax. Rows
    that are not `present` are not read."""
    latent_dims = tl.arange(0, PADDED_LATENT)
    rotary_dims = tl.arange(0, PADDED_ROTARY)
    row = cache + row_at[:, None]
    # A free slot may hold NaN.
    latents = tl.load(
        row + latent_dims[None, :],
        mask=present[:, None] & (latent_dims < LATENT)[None, :],
        other=0.0,
    )
    keys = tl.load(
        row + LATENT + rotary_dims[None, :],
        mask=present[:, None] & (rotary_dims < ROTARY)[None, :],
        other=0.0,
    )
    scores = tl.dot(q_latent, tl.trans(latents), input_precision=PRECISION)
    scores = tl.dot(q_rotary, tl.trans(keys), scores, input_precision=PRECISION)
    return add_columns(
        scores * scale_log2, latents, shown, row_max, row_sum, acc, None, True, PRECISION
    )


@triton.jit(do_not_specialize=_STEP_NUMBERS)
def _latent_attn_kernel(
    # [T, H, L] and [T, H, P]
    q_latent,
    q_rotary,
    # [num_blocks, PAGE, L + P] by strides
    cache,
    # [T, H, L]
    output,
    # [parts, part_rows, H, L] and [parts, part_rows, H] float32, and [R, 2] int32: slot of a
    # tree's first part and number of its parts; all written, when SPLIT
    part_out,
    part_lse,
    part_record,
    # [5, R] int32: request, first query row, rows, context length, first mask row
    plan,
    # [M, W] int64
    words,
    # [B, max_blocks] int32
    block_table,
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
    latent_row,
    latent_head,
    rotary_row,
    rotary_head,
    output_row,
    output_head,
    cache_block,
    cache_token,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_M
    slot = tl.program_id(1)
    if SPLIT:
        tree, part, parts = part_of_slot(
            plan, plan_stride, num_trees, forced_parts, resident_ctas, extra, 1, slot,
            0, HEADS, BLOCK_M,
        )  # fmt: skip
        if tree < 0:
            return
        if (part == 0) & (first == 0):
            tl.store(part_record + 2 * tree, slot)
            tl.store(part_record + 2 * tree + 1, parts)
    else:
        tree = slot
        part = 0
        parts = 1
    rows = tl.load(plan + 2 * plan_stride + tree)
    if first >= rows * HEADS:
        return
    request = tl.load(plan + tree).to(tl.int64)
    row_start = tl.load(plan + plan_stride + tree).to(tl.int64)
    context = tl.load(plan + 3 * plan_stride + tree)
    mask_start = tl.load(plan + 4 * plan_stride + tree).to(tl.int64)
    table = block_table + request * table_stride

    packed = first + tl.arange(0, BLOCK_M)
    valid = packed < rows * HEADS
    # Rows past the end work on the last row, which keeps every softmax finite without a mask.
    row = tl.minimum(packed // HEADS, rows - 1)
    head = packed % HEADS
    latent_dims = tl.arange(0, PADDED_LATENT)
    rotary_dims = tl.arange(0, PADDED_ROTARY)
    in_latent = (latent_dims < LATENT)[None, :]
    latent_at = q_latent + (row_start + row) * latent_row + head * latent_head
    rotary_at = q_rotary + (row_start + row) * rotary_row + head * rotary_head
    ql = tl.load(latent_at[:, None] + latent_dims[None, :], mask=in_latent, other=0.0)
    qr = tl.load(
        rotary_at[:, None] + rotary_dims[None, :], mask=(rotary_dims < ROTARY)[None, :], other=0.0
    )

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_LATENT], tl.float32)
    columns = tl.arange(0, BLOCK_N)
    begin = context * 0
    end = context
    tail_begin = context * 0
    tail_end = rows
    if SPLIT:
        # A tree has tiles of its context, then tiles of its own columns.
        in_context = tl.cdiv(context, TILE)
        tiles = in_context + tl.cdiv(rows, TILE)
        first_tile = tiles * part // parts
        end_tile = tiles * (part + 1) // parts
        begin = tl.minimum(first_tile * TILE, context)
        end = tl.minimum(end_tile * TILE, context)
        tail_begin = tl.maximum(first_tile - in_context, 0) * TILE
        tail_end = tl.minimum((end_tile - in_context) * TILE, rows)

    for start in range(begin, end, BLOCK_N):
        position = start + columns
        present = position < end
        pages = tl.load(table + position // PAGE, mask=present, other=0).to(tl.int64)
        row_max, row_sum, acc = _attend_rows(
            ql, qr, cache, pages * cache_block + position % PAGE * cache_token, present,
            present[None, :], row_max, row_sum, acc, scale_log2,
            LATENT, PADDED_LATENT, ROTARY, PADDED_ROTARY, PRECISION,
        )  # fmt: skip

    word_at = words + (mask_start + row) * words_stride
    for start in range(tail_begin, tail_end, BLOCK_N):
        column = start + columns
        present = column < rows
        position = context + column
        pages = tl.load(table + position // PAGE, mask=present, other=0).to(tl.int64)
        # BLOCK_N divides 64: the columns of a tile share one word of a row.
        word = tl.load(word_at + start // 64)
        bit = (start % 64 + columns).to(tl.int64)
        shown = (((word[:, None] >> bit[None, :]) & 1) == 1) & present[None, :]
        row_max, row_sum, acc = _attend_rows(
            ql, qr, cache, pages * cache_block + position % PAGE * cache_token, present,
            shown, row_max, row_sum, acc, scale_log2,
            LATENT, PADDED_LATENT, ROTARY, PADDED_ROTARY, PRECISION,
        )  # fmt: skip

    # A part may have none of a row's columns. It writes -inf, and its output is not read.
    acc = acc / row_sum[:, None]
    inside = valid[:, None] & in_latent
    if SPLIT and parts > 1:
        part_row = (slot.to(tl.int64) * part_rows + row) * HEADS + head
        tl.store(part_out + (part_row * LATENT)[:, None] + latent_dims[None, :], acc, mask=inside)
        logarithm = (row_max + tl.log2(tl.where(row_sum > 0.0, row_sum, 1.0))) * LN_2
        tl.store(part_lse + part_row, logarithm, mask=valid)
    else:
        at = output + (row_start + row) * output_row + head * output_head
        tl.store(at[:, None] + latent_dims[None, :], acc.to(output.dtype.element_ty), mask=inside)


def latent_attn_triton(
    # [T, H, L] and [T, H, P]
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    # [num_blocks, block_size, L + P]
    cache: torch.Tensor,
    # [T, H, L], written in place
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    *,
    splits: int | None = None,
) -> None:
    """Computes the attention of tree rows over a latent cache. No host synchronisation, graph safe.

    Row i of a tree attends the slots of its context and, by its mask, the tree's own slots, which
    follow the context. The guarantees are those of `cuda_contract`.

    Args:
        splits: forces the parts of equally long trees.
    """
    _, num_heads, latent = q_latent.shape
    rotary = q_rotary.shape[2]
    assert cache.shape[2] == latent + rotary, (cache.shape, latent, rotary)
    assert q_latent.dtype == q_rotary.dtype == cache.dtype, (q_latent.dtype, cache.dtype)
    for tensor in (q_latent, q_rotary, cache, output):
        assert tensor.stride(2) == 1, tensor.stride()
    if meta.num_trees == 0 or meta.max_rows == 0:
        return
    num_sms = _device_limits(cache.device)[0]
    packed_rows = meta.max_rows * num_heads
    config = choose_config(packed_rows, cache.element_size())
    row_tiles = triton.cdiv(packed_rows, config.block_m)
    split = grid_split_of(
        meta.num_trees, row_tiles, config, meta.max_context + meta.max_rows, num_sms, splits
    )
    cut = split.parts > 0
    part_out, part_lse, part_record = q_latent, q_latent, meta.plan
    if cut:
        part_shape = (split.parts, meta.max_rows, num_heads)
        part_out = q_latent.new_empty((*part_shape, latent), dtype=torch.float32)
        part_lse = q_latent.new_empty(part_shape, dtype=torch.float32)
        part_record = q_latent.new_empty((meta.num_trees, 2), dtype=torch.int32)
    words = tree_words(meta)
    _latent_attn_kernel[(row_tiles, split.slots)](
        q_latent,
        q_rotary,
        cache,
        output,
        part_out,
        part_lse,
        part_record,
        meta.plan,
        words,
        meta.block_table,
        scale * LOG2_E,
        meta.num_trees,
        split.forced_parts,
        resident_ctas_of(config, num_sms),
        split.slots - meta.num_trees,
        meta.max_rows,
        meta.plan.stride(0),
        words.stride(0),
        meta.block_table.stride(0),
        *q_latent.stride()[:2],
        *q_rotary.stride()[:2],
        *output.stride()[:2],
        *cache.stride()[:2],
        HEADS=num_heads,
        LATENT=latent,
        PADDED_LATENT=max(16, triton.next_power_of_2(latent)),
        ROTARY=rotary,
        PADDED_ROTARY=max(16, triton.next_power_of_2(rotary)),
        PAGE=cache.shape[1],
        SPLIT=cut,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PRECISION="ieee" if cache.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if cut:
        merge_parts(part_out, part_lse, part_record, output, meta.plan)


# Context length and nodes of the trees of `self_test`: no context, an edge of a word, long.
_TEST_TREES = ((0, 0), (33, 8), (700, 70))
# Inputs are standard normal, so outputs are at most about 4: a few units of rounding.
_TEST_LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def self_test(
    # [num_blocks, block_size, L + P]; only its shape, dtype and device are used
    like: torch.Tensor,
    latent_size: int,
    num_heads: int,
) -> float:
    """Returns the largest difference between the kernel on this device and `latent_attn`, for a few
    trees.

    Raises:
        RuntimeError: if it is more than rounding.
    """
    _, page, size = like.shape
    rng, draw = np.random.default_rng(0), torch.Generator().manual_seed(0)
    parents = [
        np.array([rng.integers(-1, i) if i else -1 for i in range(n)], np.int32)
        for _, n in _TEST_TREES
    ]
    starts = np.cumsum([0, *(len(p) + 1 for p in parents)]).tolist()
    blocks = max(-(-(c + n + 1) // page) for c, n in _TEST_TREES)
    table = torch.randperm(len(parents) * blocks, generator=draw).view(len(parents), -1).int()
    cache = torch.randn(table.numel(), page, size, generator=draw).to(like.dtype)
    query = torch.randn(starts[-1], num_heads, size, generator=draw).to(like.dtype)
    expected = query.new_empty(*query.shape[:2], latent_size)
    spans = [
        LatentSpan(r, starts[r], context, words_to_bool(ancestor_words([parents[r]]), nodes + 1))
        for r, (context, nodes) in enumerate(_TEST_TREES)
    ]
    scale = size**-0.5
    latent_attn(query, cache, expected, spans, table, scale)
    host = tree_metadata(
        range(len(parents)), starts[:-1], [c for c, _ in _TEST_TREES], parents, table
    )
    assert host.mask_words is not None
    meta = replace(
        host,
        plan=host.plan.to(like.device),
        block_table=table.to(like.device),
        mask_words=host.mask_words.to(like.device),
    )
    asked, stored = query.to(like.device), cache.to(like.device)
    error = 0.0
    # With many heads the kernel does not split so few trees unless it is told to.
    for splits in (None, 2):
        output = torch.full_like(expected, torch.nan, device=like.device)
        latent_attn_triton(
            asked[..., :latent_size],
            asked[..., latent_size:],
            stored,
            output,
            meta,
            scale,
            splits=splits,
        )
        # `max` would drop NaN.
        found = (output.cpu().float() - expected.float()).abs().max()
        error = float(torch.maximum(found, torch.tensor(error)))
    # NaN compares as false.
    if not error <= _TEST_LIMITS[like.dtype]:
        raise RuntimeError(
            f"Tree attention over latent rows differs from the reference by {error:.2g} on this "
            f"device ({num_heads} heads over rows of {latent_size} + {size - latent_size}, "
            f"{like.dtype}). Use another target, or one of vLLM's own chain methods."
        )
    return error
