# SPDX-License-Identifier: Apache-2.0
"""Norms, rotations and gates of draft layers: torch's, whatever the sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.draft_rows import CLOSE
from vllm_specplug.kernels import add_rms_norm, gated_silu, rms_norm, rotate_heads
from vllm_specplug.kernels.extension import has_cpu_extension

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
SIZES = pytest.mark.parametrize("size", [2, 14, 16, 34, 576])


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@DTYPES
@SIZES
def test_norms(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    x, delta = torch.randn(2, 5, 3 * size).to(dtype)
    weight = torch.randn(3 * size).to(dtype)
    found = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, _norm(x, weight, 1e-5).to(dtype), **CLOSE[dtype])
    parts = _norm(x.unflatten(-1, (3, size)), weight.view(3, size), 1e-3).flatten(-2).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3, size), parts, **CLOSE[dtype])
    total, found = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(found, _norm(total, weight, 1e-5).to(dtype), **CLOSE[dtype])
    # Columns of a wider tensor.
    wide = torch.randn(4, 6 * size).to(dtype)[:, : 3 * size]
    found = rms_norm(wide, weight, 1e-5)
    torch.testing.assert_close(found, _norm(wide, weight, 1e-5).to(dtype), **CLOSE[dtype])


@DTYPES
@SIZES
def test_rotations_and_gates(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    qkv = torch.randn(6, 5, size).to(dtype)
    angles = torch.randn(9, size // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    positions = torch.tensor([8, 0, 3, 3, 1, 5])
    # Queries and keys, without the values beside them.
    x = qkv[:, :3]
    c, s = cos.double()[positions][:, None], sin.double()[positions][:, None]
    expected = x.double() * c + x.double().roll(size // 2, -1) * s
    found = rotate_heads(x, cos, sin, positions)
    torch.testing.assert_close(found, expected.to(dtype), **CLOSE[dtype])
    rows = torch.randn(5, 2 * size).to(dtype)
    gate, up = rows.double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(gated_silu(rows), expected.to(dtype), **CLOSE[dtype])


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert gated_silu(torch.empty(0, 8)).shape == (0, 4)
    table = torch.ones(2, 8)
    rotated = rotate_heads(torch.empty(0, 3, 8), table, table, torch.empty(0, dtype=torch.int64))
    assert rotated.shape == (0, 3, 8)


@pytest.mark.skipif(not has_cpu_extension(), reason="the kernels are not compiled")
def test_the_operators_refuse_what_does_not_fit() -> None:
    x, weight, out = torch.randn(3, 8), torch.ones(8), torch.empty(3, 8)
    norm = torch.ops.specplug.norm_rows.default
    bad_norms: list[tuple[Any, ...]] = [
        (x, None, weight, 3, 1e-5, None, out),
        (x, None, weight[:4], 8, 1e-5, None, out),
        (x, x, weight, 8, 1e-5, None, out),
        (x.double(), None, weight, 8, 1e-5, None, out),
        (x, None, weight, 8, 1e-5, None, out[:2]),
        (x, x[:2], weight, 8, 1e-5, out, out),
        (x[:, ::2], None, weight[:4], 4, 1e-5, None, out[:, :4].contiguous()),
    ]
    for bad in bad_norms:
        with pytest.raises(RuntimeError, match="norm_rows"):
            norm(*bad)
    heads, table, at = torch.randn(3, 2, 8), torch.ones(5, 8), torch.tensor([0, 1, 2])
    turned = torch.empty_like(heads)
    turn = torch.ops.specplug.rotate_heads.default
    for places in (at + 3, at - 1, at.int(), at[:2]):
        with pytest.raises(RuntimeError, match="rotate_heads"):
            turn(heads, table, table, places, turned)
    with pytest.raises(RuntimeError, match="rotate_heads"):
        turn(heads, table[:, :4], table, at, turned)
    with pytest.raises(RuntimeError, match="gated_silu"):
        torch.ops.specplug.gated_silu.default(x[:, :7].contiguous(), out)
