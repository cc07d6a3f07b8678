# SPDX-License-Identifier: Apache-2.0
"""Norms, rotations and gates of draft layers on the host, and on a device in Triton's interpreter:
torch's in float64, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.draft_rows import CLOSE, attend, config
from vllm_specplug.kernels import row_ops
from vllm_specplug.kernels.extension import has_cpu_extension
from vllm_specplug.methods.block.fused_head import FusedBlockHead
from vllm_specplug.methods.block.head import BlockHead

DTYPES = pytest.mark.parametrize("dtype", CLOSE)
SIZES = pytest.mark.parametrize(
    ("rows", "size"), [(0, 8), (1, 1), (5, 14), (5, 16), (3, 70), (2, 576), (2, 1030)]
)
POSITIONS = 9


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "device":
        request.getfixturevalue("on_device")
    return request.param


@pytest.fixture
def on_device(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends a CPU's tensors to the device's kernels, in the interpreter."""
    monkeypatch.setattr(row_ops, "_has_kernel", lambda x: True)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float64; as torch's own, without rounding in between."""
    return F.rms_norm(x.double(), x.shape[-1:], weight.double(), eps)


def tables(turned: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(POSITIONS, turned // 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    turned = cos.shape[1]
    first, rest = x.double().split((turned, x.shape[-1] - turned), -1)
    cos, sin = cos.double()[positions][:, None], sin.double()[positions][:, None]
    return torch.cat((first * cos + first.roll(turned // 2, -1) * sin, rest), -1)


@DTYPES
@SIZES
def test_norms(place: str, dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(rows, 3 * size).to(dtype), torch.randn(3 * size).to(dtype)
    # Columns of a wider tensor, and columns that do not lie side by side.
    delta = torch.randn(rows, 5 * size).to(dtype)[:, size : 4 * size]
    for other in (delta, delta.T.contiguous().T, delta.contiguous()):
        total, found = row_ops.add_rms_norm(x, other, weight, 1e-3)
        assert torch.equal(total, x + other)
        torch.testing.assert_close(found, norm(total, weight, 1e-3).to(dtype), **CLOSE[dtype])
        found = row_ops.rms_norm(other, weight, 1e-3)
        torch.testing.assert_close(found, norm(other, weight, 1e-3).to(dtype), **CLOSE[dtype])
        found = row_ops.rms_norm(other, weight, 1e-3, size)
        parts = norm(other.unflatten(-1, (3, size)), torch.ones(size), 1e-3).flatten(-2)
        expected = (parts * weight.double()).to(dtype)
        torch.testing.assert_close(found, expected, **CLOSE[dtype])


@DTYPES
@pytest.mark.parametrize(
    ("rows", "heads", "size", "turned"),
    [(0, 3, 8, 8), (1, 1, 2, 2), (5, 6, 64, 64), (4, 5, 128, 32), (3, 3, 34, 34), (2, 9, 256, 256)],
)
def test_heads(
    place: str, dtype: torch.dtype, rows: int, heads: int, size: int, turned: int
) -> None:
    torch.manual_seed(size)
    # Queries and keys, without the values beside them.
    x = torch.randn(rows, heads + 2, size).to(dtype)[:, :heads]
    weight = torch.randn(heads, size).to(dtype)
    cos, sin = tables(turned, dtype)
    positions = torch.tensor([POSITIONS - 1, 0, 3, 3, 1])[:rows]
    found = row_ops.norm_rotate_heads(x, weight, cos, sin, positions, 1e-3)
    normed = norm(x, torch.ones(size), 1e-3) * weight.double()
    expected = rotated(normed, cos, sin, positions).to(dtype)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, **CLOSE[dtype])
    if turned == size or place == "device":
        found = row_ops.rotate_heads(x, cos, sin, positions)
        expected = rotated(x, cos, sin, positions).to(dtype)
        torch.testing.assert_close(found, expected, **CLOSE[dtype])


@DTYPES
@SIZES
def test_gates(place: str, dtype: torch.dtype, rows: int, size: int) -> None:
    x = torch.randn(rows, 3 * size).to(dtype)[:, size:]
    for given in (x, x.contiguous()):
        gate, up = given.double().chunk(2, -1)
        expected = (F.silu(gate) * up).to(dtype)
        torch.testing.assert_close(row_ops.gated_silu(given), expected, **CLOSE[dtype])


def test_positions_are_cut_to_the_tables(on_device: None) -> None:
    x, (cos, sin) = torch.randn(2, 1, 8), tables(8, torch.float32)
    found = row_ops.rotate_heads(x, cos, sin, torch.tensor([POSITIONS, -1]))
    expected = row_ops.rotate_heads(x, cos, sin, torch.tensor([POSITIONS - 1, 0]))
    assert torch.equal(found, expected)


def test_no_number_stays_in_its_row(on_device: None) -> None:
    x = torch.randn(3, 8)
    x[1, 2] = float("nan")
    weight, (cos, sin) = torch.ones(8), tables(8, torch.float32)
    at = torch.arange(3)
    for found in (
        row_ops.rms_norm(x, weight, 1e-3),
        row_ops.norm_rotate_heads(x[:, None], weight[None], cos, sin, at, 1e-3).flatten(1),
        row_ops.gated_silu(x),
    ):
        assert found.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "partial_rotary_factor": 0.5}])
@torch.inference_mode()
def test_a_block_head_equals_the_readable_one(
    on_device: None, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    head = BlockHead(config(**changes))
    for parameter in head.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    head = head.to(dtype)
    fused = FusedBlockHead(head, POSITIONS)
    x, aux, positions = torch.randn(5, 96).to(dtype), torch.randn(5, 96).to(dtype), torch.arange(5)
    positions[-1] = POSITIONS - 1
    features = head.context_features(aux)
    found = [fused(x, positions, attend), fused.context_features(aux)]
    found += [*fused.context_kv(features, positions)]
    expected = [head(x, positions, attend), features, *head.context_kv(features, positions)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert float(error) < (1e-5 if dtype == torch.float32 else 2e-2)


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
