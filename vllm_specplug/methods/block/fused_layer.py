# SPDX-License-Identifier: Apache-2.0
"""A decoder layer of a draft head for serving: the same sums in fewer, larger matrix products."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.drafting.caches import RowAttention
from vllm_specplug.drafting.drafter import ExpertProducts, LinearFactory
from vllm_specplug.kernels import add_rms_norm, multiply_experts, rotate_heads
from vllm_specplug.kernels.draft_rows import RotaryTables
from vllm_specplug.kernels.row_ops import norm_rotate_heads
from vllm_specplug.methods.block.fused_parts import joined_weights
from vllm_specplug.methods.block.head import conv_sides
from vllm_specplug.methods.block.latent import FusedLatentProjections, LatentProjections
from vllm_specplug.methods.block.mlp import fuse_mlp


class FusedLayer:
    """Serving form of one decoder layer.

    Args:
        config: sizes of the layer.
        layer: `self_attn`, `mlp` and `post_attention_layernorm`, on their device and in their
            dtype. `self_attn` may be `LatentProjections`, or have norms of queries and keys, and a
            `gate_proj` whose sigmoid scales the attention's output. The layer may have an
            `attention_conv` and a `mlp_conv`.
        make_linear: makes a linear layer from a weight and a bias.
        multiply: products of experts, for an MLP that has them.
    """

    def __init__(
        self,
        config: Any,
        layer: Any,
        rotary: RotaryTables,
        make_linear: LinearFactory,
        multiply: ExpertProducts = multiply_experts,
    ) -> None:
        attn = layer.self_attn
        self.eps, self.rotary, self.head_dim = config.rms_norm_eps, rotary, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        gates = (attn.gate_proj,) if hasattr(attn, "gate_proj") else ()
        self.num_heads, self.is_gated = heads, bool(gates)
        # Queries and keys, values, gates
        self.sizes = (heads + kv_heads, kv_heads, heads * self.is_gated)
        self.qkv: Any
        if isinstance(attn, LatentProjections):
            self.qkv = FusedLatentProjections(attn, make_linear)
        else:
            self.qkv = make_linear(*joined_weights(attn.q_proj, attn.k_proj, attn.v_proj, *gates))
        self.output = make_linear(attn.o_proj.weight, attn.o_proj.bias)
        self.mlp: Any = fuse_mlp(layer.mlp, make_linear, multiply)
        self.mlp_norm = layer.post_attention_layernorm.weight
        self.attention_conv = getattr(layer, "attention_conv", None)
        self.mlp_conv = getattr(layer, "mlp_conv", None)
        # [Hq + Hkv, Dh], or None
        self.qk_norm = None
        if hasattr(attn, "q_norm"):
            norms = attn.q_norm.weight.expand(heads, -1), attn.k_norm.weight.expand(kv_heads, -1)
            self.qk_norm = torch.cat(norms).contiguous()

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Norms queries and keys [T, Hq + Hkv, Dh], or only keys, and rotates them by the angles of
        positions [T]."""
        if self.qk_norm is None:
            return rotate_heads(heads, *self.rotary, positions)
        norm = self.qk_norm[-heads.shape[1] :]
        return norm_rotate_heads(heads, norm, *self.rotary, positions, self.eps)

    def run(
        self,
        normed: torch.Tensor,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: RowAttention,
        next_norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Projections' input, residual [T, H] and positions [T] -> the layer's output [T, H] after
        and before the next norm."""
        before, after = conv_sides(self.attention_conv, normed)
        heads = self.qkv(before(normed)).unflatten(-1, (-1, self.head_dim))
        qk, value, gate = heads.split(self.sizes, dim=1)
        qk = self.rotate(qk, positions)
        mixed = attend(qk[:, : self.num_heads], qk[:, self.num_heads :], value)
        if self.is_gated:
            mixed = mixed * gate.sigmoid()
        delta = after(self.output(mixed.flatten(-2)))
        x, normed = add_rms_norm(x, delta, self.mlp_norm, self.eps)
        before, after = conv_sides(self.mlp_conv, normed)
        x, normed = add_rms_norm(x, after(self.mlp(before(normed))), next_norm, self.eps)
        return normed, x
