# SPDX-License-Identifier: Apache-2.0
"""Norms, rotations and gates of a device equal torch's, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.draft_rows import CLOSE, attend, config
from vllm_specplug.kernels import row_ops
from vllm_specplug.methods.block.fused_head import FusedBlockHead
from vllm_specplug.methods.block.head import BlockHead

pytestmark = pytest.mark.usefixtures("interpreter")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
POSITIONS = 9


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)


def use_kernels(patch: pytest.MonkeyPatch) -> None:
    """Tensors of a CPU go where those of a device do."""
    patch.setattr(row_ops, "_has_kernel", lambda x: True)


def tables(turned: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(POSITIONS, turned // 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    turned = cos.shape[1]
    first, rest = x.float().split((turned, x.shape[-1] - turned), -1)
    cos, sin = cos.float()[positions][:, None], sin.float()[positions][:, None]
    return torch.cat((first * cos + first.roll(turned // 2, -1) * sin, rest), -1).to(x.dtype)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 70), (2, 1030)])
def test_norms(dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(rows, 3 * size).to(dtype), torch.randn(3 * size).to(dtype)
    # Columns of a wider tensor, and columns that do not lie side by side.
    delta = torch.randn(rows, 5 * size).to(dtype)[:, size : 4 * size]
    for other in (delta, delta.T.contiguous().T):
        total, found = row_ops.add_rms_norm(x, other, weight, 1e-3)
        assert torch.equal(total, x + other)
        expected = F.rms_norm(total, total.shape[1:], weight, 1e-3)
        torch.testing.assert_close(found, expected, **CLOSE[dtype])
        found = row_ops.rms_norm(other, weight, 1e-3)
        expected = F.rms_norm(other, other.shape[1:], weight, 1e-3)
        torch.testing.assert_close(found, expected, **CLOSE[dtype])
        found = row_ops.rms_norm(other, weight, 1e-3, size)
        expected = F.rms_norm(other.unflatten(-1, (3, size)), (size,), eps=1e-3).flatten(-2)
        torch.testing.assert_close(found, expected * weight, **CLOSE[dtype])


@DTYPES
@pytest.mark.parametrize(
    ("rows", "heads", "size", "turned"),
    [(0, 3, 8, 8), (1, 1, 2, 2), (5, 6, 64, 64), (4, 5, 128, 32), (3, 3, 96, 96), (2, 9, 256, 256)],
)
def test_heads(dtype: torch.dtype, rows: int, heads: int, size: int, turned: int) -> None:
    torch.manual_seed(size)
    # Queries and keys, without the values beside them.
    x = torch.randn(rows, heads + 2, size).to(dtype)[:, :heads]
    weight = torch.randn(heads, size).to(dtype)
    cos, sin = tables(turned, dtype)
    positions = torch.tensor([POSITIONS - 1, 0, 3, 3, 1])[:rows]
    found = row_ops.norm_rotate_heads(x, weight, cos, sin, positions, 1e-3)
    expected = rotated(F.rms_norm(x, (size,), eps=1e-3) * weight, cos, sin, positions)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, **CLOSE[dtype])
    found = row_ops.rotate_heads(x, cos, sin, positions)
    torch.testing.assert_close(found, rotated(x, cos, sin, positions), **CLOSE[dtype])


def test_positions_are_cut_to_the_tables() -> None:
    x, (cos, sin) = torch.randn(2, 1, 8), tables(8, torch.float32)
    found = row_ops.rotate_heads(x, cos, sin, torch.tensor([POSITIONS, -1]))
    expected = row_ops.rotate_heads(x, cos, sin, torch.tensor([POSITIONS - 1, 0]))
    assert torch.equal(found, expected)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 70), (2, 1030)])
def test_gates(dtype: torch.dtype, rows: int, size: int) -> None:
    x = torch.randn(rows, 3 * size).to(dtype)[:, size:]
    gate, up = x.float().chunk(2, -1)
    torch.testing.assert_close(row_ops.gated_silu(x), (F.silu(gate) * up).to(dtype), **CLOSE[dtype])


def test_no_number_stays_in_its_row() -> None:
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
def test_a_block_head_equals_the_readable_one(dtype: torch.dtype, changes: dict[str, Any]) -> None:
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
