# SPDX-License-Identifier: Apache-2.0
"""What lies between the matrix products of a draft layer, on a handful of rows.

Composed of torch's operators, the norms alone take an eighth of a small head's draft on a CPU core.
Results are rounded once, where torch's compositions round in between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .extension import has_cpu_extension

_COMPILED = (torch.bfloat16, torch.float32)


def _is_compiled(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _COMPILED and has_cpu_extension()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, size: int = 0) -> torch.Tensor:
    """Root-mean-square norm of x [T, N], times weight [N]; each `size` numbers of a row alone
    where it is given."""
    size = size or x.shape[-1]
    if _is_compiled(x):
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.ops.specplug.norm_rows.default(x, None, weight, size, eps, None, out)
        return out
    if size == x.shape[-1]:
        return F.rms_norm(x, (size,), weight, eps)
    return F.rms_norm(x.unflatten(-1, (-1, size)), (size,), eps=eps).flatten(-2) * weight


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + delta [T, N], and its norm times weight [N]."""
    if _is_compiled(x) and x.is_contiguous() and delta.is_contiguous():
        total, out = torch.empty_like(x), torch.empty_like(x)
        torch.ops.specplug.norm_rows.default(x, delta, weight, x.shape[-1], eps, total, out)
        return total, out
    total = x + delta
    return total, F.rms_norm(total, (x.shape[-1],), weight, eps)


def rotate_heads(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Turns the two halves of x [T, heads, Dh] by the angles of positions [T].

    Args:
        cos: [P, Dh], the cosines of both halves.
        sin: [P, Dh], the sines of both halves, negative in the first one.

    Raises:
        RuntimeError: for a position outside the tables.
    """
    if _is_compiled(x) and x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        out = x.new_empty(x.shape)
        torch.ops.specplug.rotate_heads.default(x, cos, sin, positions, out)
        return out
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return x * cos[positions].unsqueeze(1) + swapped * sin[positions].unsqueeze(1)


def gated_silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of x [T, 2I] times its second half, [T, I]."""
    if _is_compiled(x) and x.is_contiguous():
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        torch.ops.specplug.gated_silu.default(x, out)
        return out
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
