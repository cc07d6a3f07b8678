# SPDX-License-Identifier: Apache-2.0
"""`row_ops` on a device, each in one launch.

With torch's operators, a layer with normed heads takes 22 launches in addition to its matrix
products and attention; here it takes 4: heads, sum and norm, gate, sum and norm. Sums and
statistics are float32, and results are rounded once. A norm uses the rounded sum.

Letters: T rows, N numbers of a row, Dh head size, P positions of the rotary tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Numbers per program, of heads of a row and of columns of a gate.
_HEAD_NUMBERS, _COLUMNS = 1024, 1024


@triton.jit
def _norm_rows_kernel(
    # [T, N]
    x,
    # [T, N]
    delta,
    # [N]
    weight,
    # [T, N], written
    total,
    # [T, N], written
    output,
    x_row,
    delta_row,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    to = (row * tl.num_programs(1) + part) * SIZE + i
    i += part * SIZE
    # Loaded before the sum, for which all later operations wait.
    weights = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + row * delta_row + i, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + to, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value *= 1.0 / tl.sqrt(tl.sum(value * value, 0) / SIZE + eps) * weights
    tl.store(output + to, value.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _norm_rotate_kernel(
    # [T, heads, Dh]
    x,
    # [heads, Dh]
    weight,
    # [P, TURNED] each
    cos,
    sin,
    # [T] int64
    positions,
    # [T, heads, Dh], written
    output,
    x_row,
    x_head,
    num_heads,
    num_positions,
    eps,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TURNED: tl.constexpr,
    HEADS: tl.constexpr,
    NORMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.minimum(tl.maximum(tl.load(positions + row), 0), num_positions - 1)
    dim = tl.arange(0, PADDED_DIM)
    angle, is_turned = position * TURNED + dim, dim < TURNED
    c = tl.load(cos + angle, mask=is_turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=is_turned, other=0.0).to(tl.float32)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    inside = (head < num_heads) & (dim < HEAD_DIM)[None, :]
    # Numbers that are not rotated are their own partner, times 0.
    partner = tl.where(is_turned, (dim + TURNED // 2) % TURNED, dim)
    at = x + row * x_row + head * x_head
    value = tl.load(at + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        at = weight + head * HEAD_DIM
        weights = tl.load(at + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        others = tl.load(at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / HEAD_DIM + eps)[:, None]
        value *= scale * weights
        other *= scale * others
    value = value * c[None, :] + other * s[None, :]
    to = (row * num_heads + head) * HEAD_DIM + dim[None, :]
    tl.store(output + to, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _gated_silu_kernel(
    # [T, 2 * N]
    x,
    # [T, N], written
    output,
    x_row,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    at = x + row * x_row + i
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(output + row * size + i, gated.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _round_rows_kernel(
    # [T, N]
    x,
    # [T, N] e4m3, written
    output,
    # [T] float32, written
    scales,
    x_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    value = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    # Any scale is correct for a row of zeros.
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-20) / LARGEST
    # Division may round past the largest number of e4m3.
    rounded = tl.clamp(value / scale, -LARGEST, LARGEST)
    tl.store(output + row * SIZE + i, rounded.to(output.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def round_rows_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x [T, N] divided by its rows' scales, in e4m3, and the scales float32 [T, 1]. Graph
    safe."""
    rows, size = x.shape
    x = _side_by_side(x)
    output = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        _round_rows_kernel[(rows,)](
            x, output, scales, x.stride(0), SIZE=size, BLOCK=block,
            LARGEST=torch.finfo(output.dtype).max, num_warps=min(32, max(1, block // 512)),
        )  # fmt: skip
    return output, scales


def norm_rows_triton(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x + delta, or x, and `row_ops.rms_norm` of it. Graph safe."""
    rows, numbers = x.shape
    assert weight.shape == (numbers,) and numbers % size == 0, (x.shape, weight.shape, size)
    assert weight.is_contiguous()
    x = _side_by_side(x)
    output = x.new_empty(x.shape)
    total = added = output
    if delta is not None:
        assert delta.shape == x.shape and delta.dtype == x.dtype, (delta.shape, delta.dtype)
        total, added = x.new_empty(x.shape), _side_by_side(delta)
    if rows:
        block = triton.next_power_of_2(size)
        _norm_rows_kernel[(rows, numbers // size)](
            x, added, weight, total, output, x.stride(0), added.stride(0), eps, SIZE=size,
            BLOCK=block, ADDS=delta is not None, num_warps=min(32, max(1, block // 512)),
        )  # fmt: skip
    return total, output


def norm_rotate_triton(
    # [T, heads, Dh]
    x: torch.Tensor,
    # [heads, Dh]
    weight: torch.Tensor | None,
    # [P, turned] each
    cos: torch.Tensor,
    sin: torch.Tensor,
    # [T] int64
    positions: torch.Tensor,
    eps: float = 0.0,
) -> torch.Tensor:
    """`row_ops.norm_rotate_heads`, without the norm if there is no weight. Graph safe. Positions
    are clamped to the tables."""
    rows, heads, head_dim = x.shape
    turned = cos.shape[1]
    assert cos.shape == sin.shape and turned <= head_dim and turned % 2 == 0, (cos.shape, sin.shape)
    assert positions.shape == (rows,) and positions.is_contiguous(), positions.shape
    assert weight is None or weight.shape == x.shape[1:], (x.shape, weight)
    for tensor in (cos, sin, *(() if weight is None else (weight,))):
        assert tensor.is_contiguous(), tensor.stride()
    x = _side_by_side(x)
    output = x.new_empty(x.shape)
    if rows:
        padded = triton.next_power_of_2(head_dim)
        block = min(max(1, _HEAD_NUMBERS // padded), triton.next_power_of_2(heads))
        _norm_rotate_kernel[(rows, triton.cdiv(heads, block))](
            x, cos if weight is None else weight, cos, sin, positions, output, x.stride(0),
            x.stride(1), heads, len(cos), eps, HEAD_DIM=head_dim, PADDED_DIM=padded,
            TURNED=turned, HEADS=block, NORMS=weight is not None,
        )  # fmt: skip
    return output


def gated_silu_triton(x: torch.Tensor) -> torch.Tensor:
    """`row_ops.gated_silu`, graph safe."""
    rows, size = x.shape[0], x.shape[1] // 2
    x = _side_by_side(x)
    output = x.new_empty(rows, size)
    if rows:
        _gated_silu_kernel[(rows, triton.cdiv(size, _COLUMNS))](
            x, output, x.stride(0), size, BLOCK=_COLUMNS
        )
    return output


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
