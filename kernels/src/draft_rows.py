# SPDX-License-Identifier: Apache-2.0
"""The parts of a block head around its attention, each as one call on a CPU.

After a forward of the target the caches hold its weights, and a small operator takes several times
as long as usual. A draft layer of torch's operators has thirty of them. Here norms, rotations and
residual sums are fused with the adjacent products. The products are packed int8 ones;
`methods.block.fused_head` has torch versions for all others.

Letters: T rows, M committed tokens, L layers, H hidden size, Dh head size, I MLP width,
P positions of the rotary tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .packed_linear import PackedInt8Linear

# Vector size. Heads and the rotated part of their halves must be multiples.
_LANES = 16
_MOST_HEAD_SIZE = 1024


class RotaryTables(NamedTuple):
    """Rotary tables by position: cos and sin [P, turned] of both halves of the rotated part of a
    head; sin is negative in the first half."""

    cos: torch.Tensor
    sin: torch.Tensor


def can_join_rows(products: list[Any], head_dim: int, turned: int, dtype: torch.dtype) -> bool:
    """Whether layers with these products of a `LinearFactory` can be computed here.

    Args:
        turned: leading dimensions of a head that are rotated.
        dtype: of the norms' weights and of the rows.
    """
    return (
        dtype == torch.bfloat16
        and all(isinstance(product, PackedInt8Linear) for product in products)
        and 0 < head_dim <= _MOST_HEAD_SIZE
        and head_dim % _LANES == 0
        and turned % (2 * _LANES) == 0
    )


def project_heads(
    # [T, H]
    x: torch.Tensor,
    # [H]
    norm: torch.Tensor,
    product: PackedInt8Linear,
    # [normed, Dh]
    head_norms: torch.Tensor,
    rotary: RotaryTables,
    # int64 [T]
    positions: torch.Tensor,
    eps: float,
    # [T, heads, Dh], written in place
    out: torch.Tensor,
) -> None:
    """Writes the product of x's norm as heads. The first ones, which have a norm in `head_norms`,
    are normed and rotated.

    Raises:
        RuntimeError: where shapes or dtypes do not fit, or a position is outside the tables.
    """
    torch.ops.specplug.project_heads.default(
        x, norm, product.parts, head_norms, rotary.cos, rotary.sin, positions, eps, out
    )


def finish_layer(
    # [T, H], changed in place
    x: torch.Tensor,
    # [T, W], output of the attention
    mixed: torch.Tensor,
    output: PackedInt8Linear,
    # [H]
    norm: torch.Tensor,
    gate_up: PackedInt8Linear,
    down: PackedInt8Linear,
    intermediate: int,
    eps: float,
) -> None:
    """Adds to x the output product of `mixed`, and then the gated MLP of its norm.

    Raises:
        RuntimeError: where shapes or dtypes do not fit.
    """
    torch.ops.specplug.finish_layer.default(
        x, mixed, output.parts, norm, gate_up.parts, down.parts, intermediate, eps
    )


def context_heads(
    # [M, F]
    aux: torch.Tensor,
    join: PackedInt8Linear,
    # [H]
    norm: torch.Tensor,
    product: PackedInt8Linear,
    # [L, Dh]
    key_norms: torch.Tensor,
    rotary: RotaryTables,
    # int64 [M]
    positions: torch.Tensor,
    eps: float,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns normed and rotated keys and values of all layers, [L, M, Hkv, Dh], from the target's
    states of committed tokens. `product` has the keys of all layers, then the values.

    Raises:
        RuntimeError: where shapes or dtypes do not fit, or a position is outside the tables.
    """
    shape = (len(key_norms), len(aux), num_kv_heads, key_norms.shape[1])
    keys, values = aux.new_empty(shape), aux.new_empty(shape)
    torch.ops.specplug.context_heads.default(
        aux.contiguous(), join.parts, norm, product.parts, key_norms, rotary.cos, rotary.sin,
        positions, eps, keys, values,
    )  # fmt: skip
    return keys, values
