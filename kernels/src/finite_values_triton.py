# SPDX-License-Identifier: Apache-2.0
"""`finite_values` on a device, without waiting for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rows of a program.
_ROWS = 16


@triton.jit(
    do_not_specialize=["num_rows", "key_row", "value_row"],
    do_not_specialize_on_alignment=["key", "value"],
)
def _contain_nonfinite_kernel(
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
    # NaN compares as false.
    v = tl.load(value_at, mask=inside, other=0.0).to(tl.float32)
    bad = (tl.abs(v) < float("inf")) == 0
    in_bad_row = tl.max(bad.to(tl.int32), 1)[:, None] > 0
    tl.store(value_at, tl.zeros_like(v).to(value.dtype.element_ty), mask=inside & bad)
    nan = tl.full(v.shape, float("nan"), tl.float32)
    key_at = key + row[:, None] * key_row + in_head
    tl.store(key_at, nan.to(key.dtype.element_ty), mask=inside & in_bad_row)


def contain_nonfinite_triton(
    # [T, H, D] each, heads of a row side by side; written in place
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """`finite_values.contain_nonfinite` in place. No host synchronisation, graph safe."""
    rows, heads, head_dim = value.shape
    assert key.shape == value.shape, (key.shape, value.shape)
    for tensor in (key, value):
        assert tensor.stride(2) == 1 and tensor.stride(1) == head_dim, tensor.stride()
    if rows:
        _contain_nonfinite_kernel[(triton.cdiv(rows, _ROWS), heads)](
            key, value, rows, key.stride(0), value.stride(0), HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim), ROWS=_ROWS, num_warps=4,
        )  # fmt: skip
