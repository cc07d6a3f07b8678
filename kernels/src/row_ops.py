# SPDX-License-Identifier: Apache-2.0
"""The operators between the matrix products of a draft layer, for a few rows.

With torch's operators, the norms take an eighth of a small head's draft on a CPU core, and launches
dominate a draft on a GPU, for which `row_ops_triton` has a kernel per function. Results are rounded
once, while compositions of torch's operators also round in between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .extension import has_cpu_extension

_COMPILED = (torch.bfloat16, torch.float32)
_TRITON = (torch.bfloat16, torch.float16, torch.float32)


def _is_compiled(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _COMPILED and has_cpu_extension()


def _has_kernel(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in _TRITON


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, size: int = 0) -> torch.Tensor:
    """Returns the root-mean-square norm of x [T, N], or of each `size` numbers of a row if given,
    times weight [N]."""
    size = size or x.shape[-1]
    if _has_kernel(x):
        from .row_ops_triton import norm_rows_triton

        return norm_rows_triton(x, None, weight, eps, size)[1]
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
    """Returns x + delta [T, N], and its norm times weight [N]."""
    if _has_kernel(x):
        from .row_ops_triton import norm_rows_triton

        return norm_rows_triton(x, delta, weight, eps, x.shape[-1])
    if _is_compiled(x) and x.is_contiguous() and delta.is_contiguous():
        total, out = torch.empty_like(x), torch.empty_like(x)
        torch.ops.specplug.norm_rows.default(x, delta, weight, x.shape[-1], eps, total, out)
        return total, out
    total = x + delta
    return total, F.rms_norm(total, (x.shape[-1],), weight, eps)


def rotate_heads(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Rotates the two halves of x [T, heads, Dh] by the angles of positions [T], or of as many of
    its first numbers as the tables have columns.

    Args:
        cos: [P, Dh], the cosines of both halves.
        sin: [P, Dh], the sines of both halves, negative in the first one.

    Raises:
        RuntimeError: on a CPU, for a position outside the tables.
    """
    if _has_kernel(x):
        from .row_ops_triton import norm_rotate_triton

        return norm_rotate_triton(x, None, cos, sin, positions)
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        rotated = rotate_heads(x[..., :turned].contiguous(), cos, sin, positions)
        return torch.cat((rotated, x[..., turned:]), dim=-1)
    if _is_compiled(x) and x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        out = x.new_empty(x.shape)
        torch.ops.specplug.rotate_heads.default(x, cos, sin, positions, out)
        return out
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return x * cos[positions].unsqueeze(1) + swapped * sin[positions].unsqueeze(1)


def norm_rotate_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`rms_norm` of each head of x [T, heads, Dh] times weight [heads, Dh], then
    `rotate_heads`."""
    if _has_kernel(x):
        from .row_ops_triton import norm_rotate_triton

        return norm_rotate_triton(x, weight, cos, sin, positions, eps)
    normed = rms_norm(x.flatten(-2), weight.flatten(), eps, x.shape[-1]).view(x.shape)
    return rotate_heads(normed, cos, sin, positions)


def gated_silu(x: torch.Tensor) -> torch.Tensor:
    """Returns SiLU of the first half of x [T, 2I] times its second half, [T, I]."""
    if _has_kernel(x):
        from .row_ops_triton import gated_silu_triton

        return gated_silu_triton(x)
    if _is_compiled(x) and x.is_contiguous():
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        torch.ops.specplug.gated_silu.default(x, out)
        return out
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x [T, N] divided by its rows' largest magnitude / 448, in e4m3, and these scales [T,
    1]."""
    if _has_kernel(x):
        from .row_ops_triton import round_rows_triton

        return round_rows_triton(x)
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = x.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-20) / largest
    rounded = (x.float() / scales).clamp(-largest, largest)
    return rounded.to(torch.float8_e4m3fn), scales
