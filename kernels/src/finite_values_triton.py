# SPDX-License-Identifier: Apache-2.0
"""`finite_values` on a device without synchronisation: while keys and values are stored, before
vLLM stores them as e4m3, or after it has quantised each token with its own scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rows of a program.
_ROWS = 16


@triton.jit
def _nonfinite(v):
    """Returns which numbers of a head's values [rows, D] are not finite, and which rows have
    any."""
    # NaN compares as false.
    bad = (tl.abs(v.to(tl.float32)) < float("inf")) == 0
    return bad, tl.max(bad.to(tl.int32), 1)[:, None] > 0


@triton.jit(
    do_not_specialize=["num_rows", "key_row", "value_row"],
    do_not_specialize_on_alignment=["key", "value", "slots"],
)
def _store_isolated_kernel(
    # [T, H, D] each
    key,
    value,
    # pages, written
    keys,
    values,
    # [T] int64
    slots,
    num_rows,
    key_row,
    value_row,
    block,
    token,
    head,
    PAGE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    stored = (slot >= 0)[:, None]
    at = slot // PAGE * block + slot % PAGE * token + tl.program_id(1).to(tl.int64) * head
    dims = tl.arange(0, PADDED_DIM)
    inside = stored & (dims < HEAD_DIM)[None, :]
    in_head = tl.program_id(1) * HEAD_DIM + dims[None, :]
    v = tl.load(value + row[:, None] * value_row + in_head, mask=inside, other=0.0)
    bad, in_bad_row = _nonfinite(v)
    v = tl.where(bad, tl.zeros_like(v), v)
    tl.store(values + at[:, None] + dims[None, :], v, mask=inside)
    dims = tl.arange(0, PADDED_KEY)
    inside = stored & (dims < KEY_DIM)[None, :]
    in_head = tl.program_id(1) * KEY_DIM + dims[None, :]
    k = tl.load(key + row[:, None] * key_row + in_head, mask=inside, other=0.0)
    nan = tl.full(k.shape, float("nan"), tl.float32).to(k.dtype)
    tl.store(keys + at[:, None] + dims[None, :], tl.where(in_bad_row, nan, k), mask=inside)


def store_isolated_triton(
    # [T, H, Dk] and [T, H, Dv], heads of a row side by side
    key: torch.Tensor,
    value: torch.Tensor,
    # [num_blocks, block_size, H, Dk] and [.., Dv] of equal strides and of their dtype, written in
    # place
    keys: torch.Tensor,
    values: torch.Tensor,
    # int64 [S], S <= T; negative for rows that are not stored
    slots: torch.Tensor,
) -> None:
    """Stores the first S rows of `finite_values.isolate_nonfinite`. No host synchronisation, graph
    safe."""
    assert len(slots) <= len(key), (slots.shape, key.shape)
    _, page, heads, head_dim = values.shape
    key_dim = keys.shape[3]
    assert keys.stride() == values.stride() and values.stride(3) == 1, values.stride()
    for tensor, cache in ((key, keys), (value, values)):
        assert tensor.dtype == cache.dtype and tensor.shape[1:] == cache.shape[2:], tensor.shape
        # The stride of a single head is undefined.
        assert tensor.stride(2) == 1 and (heads == 1 or tensor.stride(1) == tensor.shape[2]), (
            tensor.stride()
        )
    rows = len(slots)
    if rows:
        _store_isolated_kernel[(triton.cdiv(rows, _ROWS), heads)](
            key, value, keys, values, slots, rows, key.stride(0), value.stride(0),
            *values.stride()[:3], PAGE=page, KEY_DIM=key_dim,
            PADDED_KEY=triton.next_power_of_2(key_dim), HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim), ROWS=_ROWS, num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "key_row", "value_row"],
    do_not_specialize_on_alignment=["key", "value"],
)
def _isolate_nonfinite_kernel(
    # [T, H, D] each, written in place
    key,
    value,
    num_rows,
    key_row,
    value_row,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    inside = (row < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    in_head = tl.program_id(1) * HEAD_DIM + dims[None, :]
    value_at = value + row[:, None] * value_row + in_head
    v = tl.load(value_at, mask=inside, other=0.0)
    bad, in_bad_row = _nonfinite(v)
    tl.store(value_at, tl.zeros_like(v), mask=inside & bad)
    nan = tl.full(v.shape, float("nan"), tl.float32)
    key_at = key + row[:, None] * key_row + in_head
    tl.store(key_at, nan.to(key.dtype.element_ty), mask=inside & in_bad_row)


def isolate_nonfinite_triton(
    # [T, H, D] each, heads of a row side by side; written in place
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """`finite_values.isolate_nonfinite` in place. No host synchronisation, graph safe."""
    rows, heads, head_dim = value.shape
    assert key.shape == value.shape, (key.shape, value.shape)
    for tensor in (key, value):
        assert tensor.stride(2) == 1 and tensor.stride(1) == head_dim, tensor.stride()
    if rows:
        _isolate_nonfinite_kernel[(triton.cdiv(rows, _ROWS), heads)](
            key, value, rows, key.stride(0), value.stride(0), HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim), ROWS=_ROWS, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def _isolate_token_scales_kernel(
    # uint8 or int8, written in place
    values,
    # float32, written in place
    key_scales,
    value_scales,
    # [T] int64
    slots,
    num_rows,
    value_block,
    value_token,
    value_head,
    scale_block,
    scale_token,
    scale_head,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    FLOATS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    stored = slot >= 0
    page = slot // PAGE
    page_slot = slot % PAGE
    scale_at = page * scale_block + page_slot * scale_token + head * scale_head
    scale = tl.load(value_scales + scale_at, mask=stored, other=0.0)
    # NaN compares as false.
    bad_scale = (tl.abs(scale) < float("inf")) == 0
    bad = bad_scale
    if FLOATS:
        dims = tl.arange(0, PADDED_DIM)
        inside = stored[:, None] & (dims < HEAD_DIM)[None, :]
        value_at = (
            values + (page * value_block + page_slot * value_token + head * value_head)[:, None]
        )
        value_at += dims[None, :]
        # e4m3 has no infinity, and NaN of both signs.
        nan = inside & ((tl.load(value_at, mask=inside, other=0) & 0x7F) == 0x7F)
        tl.store(value_at, tl.zeros(nan.shape, values.dtype.element_ty), mask=nan)
        bad = bad | (tl.max(nan.to(tl.int32), 1) > 0)
    tl.store(value_scales + scale_at, tl.zeros_like(scale), mask=stored & bad_scale)
    nan_scale = tl.full(scale.shape, float("nan"), tl.float32)
    tl.store(key_scales + scale_at, nan_scale, mask=stored & bad)


def isolate_token_scales_triton(
    # [num_blocks, block_size, Hkv, Dh] of one byte each: numbers of the values, written in place
    values: torch.Tensor,
    # float32 [num_blocks, block_size, Hkv] of equal strides, written in place
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
    # int64 [T]: those just stored; negative for padding
    slots: torch.Tensor,
    *,
    floats: bool,
) -> None:
    """`finite_values.isolate_nonfinite` for slots that have scales per token.

    A value that was not finite has a scale that is not finite, or, in e4m3 (`floats`), NaN numbers.
    These become 0, and the key's scale becomes NaN. Numbers that vLLM's store makes finite stay, as
    in plain decoding. No host synchronisation, graph safe.
    """
    _, page, heads, head_dim = values.shape
    assert values.element_size() == 1 and values.stride(3) == 1, (values.dtype, values.stride())
    strides = value_scales.stride()
    assert key_scales.stride() == strides, (key_scales.stride(), strides)
    rows = len(slots)
    if rows:
        _isolate_token_scales_kernel[(triton.cdiv(rows, _ROWS), heads)](
            values.view(torch.uint8), key_scales, value_scales, slots, rows, *values.stride()[:3],
            *strides, PAGE=page, HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim), FLOATS=floats, ROWS=_ROWS, num_warps=4,
        )  # fmt: skip
