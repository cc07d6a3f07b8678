# SPDX-License-Identifier: Apache-2.0
"""A block head arranged for serving: the same sums in fewer, larger matrix products.

Drafting one block is bound by launches and weight bytes, not by arithmetic. Projections that
read the same input are joined (q, k, v; gate, up; the context keys and values of all layers),
and rotary tables are computed once. With packed int8 products everything between two of them
joins them (`kernels.draft_rows`). `methods.block.head.BlockHead` is the readable version and the
oracle.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm_specplug.drafting.drafter import LinearFactory
from vllm_specplug.kernels.draft_rows import (
    RotaryTables,
    can_join_rows,
    context_heads,
    finish_layer,
    project_heads,
)
from vllm_specplug.kernels.row_ops import rms_norm
from vllm_specplug.methods.block.head import Attend, BlockHead, BlockLayer, rotary_cos_sin


def plain_linear(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """torch's own linear layer."""
    return lambda x: F.linear(x, weight, bias)


class _FusedLayer:
    """One draft layer's packed weights."""

    def __init__(self, layer: BlockLayer, make_linear: LinearFactory) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        projections = (attn.q_proj, attn.k_proj, attn.v_proj)
        self.qkv = make_linear(*_joined(projections))
        self.output = make_linear(attn.o_proj.weight, attn.o_proj.bias)
        self.gate_up = make_linear(*_joined((mlp.gate_proj, mlp.up_proj)))
        self.down = make_linear(mlp.down_proj.weight, None)
        self.products = (self.qkv, self.output, self.gate_up, self.down)
        # [Hq + Hkv, Dh]: queries and keys are normed and rotated in one go
        self.qk_norm = torch.cat(
            (
                attn.q_norm.weight.expand(attn.num_heads, -1),
                attn.k_norm.weight.expand(attn.num_kv_heads, -1),
            )
        ).contiguous()
        self.input_norm = layer.input_layernorm.weight
        self.post_norm = layer.post_attention_layernorm.weight


class FusedBlockHead:
    """Serving form of a `BlockHead`; see there for shapes and meaning of each method.

    Args:
        head: the loaded head, on its device and in its dtype.
        max_positions: positions the rotary tables cover.
        make_linear: how a matrix product is made; the runtime passes one that packs weights
            for the device.
    """

    def __init__(
        self, head: BlockHead, max_positions: int, make_linear: LinearFactory = plain_linear
    ) -> None:
        config = head.config
        self.config = config
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.fc = make_linear(head.fc.weight, None)
        self.hidden_norm, self.norm = head.hidden_norm.weight, head.norm.weight
        self.mask_embedding = head.mask_embedding
        attentions = [layer.self_attn for layer in head.layers]
        # [num_layers * Hkv * Dh] keys of all layers, then as many values
        self.context = make_linear(
            *_joined([a.k_proj for a in attentions] + [a.v_proj for a in attentions])
        )
        # [num_layers, Dh], and [num_layers, 1, 1, Dh]
        self.key_norms = torch.stack([a.k_norm.weight for a in attentions])
        self.context_k_norm = self.key_norms[:, None, None]
        self.layers = [_FusedLayer(layer, make_linear) for layer in head.layers]
        cos, sin = rotary_cos_sin(torch.arange(max_positions), config.rotary)
        dtype, device = head.norm.weight.dtype, head.norm.weight.device
        # Leading dimensions of a head that are turned
        self.rotated = config.rotary.rotated
        # [max_positions, 1, rotated]: both halves, so that rotating is two products and a sum
        self.cos = torch.cat((cos, cos), -1)[:, None].to(device, dtype)
        self.sin = torch.cat((-sin, sin), -1)[:, None].to(device, dtype)
        products = [self.fc, self.context, *(p for layer in self.layers for p in layer.products)]
        self.joins_rows = can_join_rows(products, self.head_dim, self.rotated, dtype)
        """Whether norms, rotations and sums are one with the products next to them."""
        self.rotary = RotaryTables(self.cos[:, 0], self.sin[:, 0])

    def context_heads(
        self, aux: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`context_kv` of the `context_features` of aux [T, L*Ht]."""
        if not self.joins_rows:
            return self.context_kv(self.context_features(aux), positions)
        return context_heads(
            aux, self.fc, self.hidden_norm, self.context, self.key_norms, self.rotary, positions,
            self.eps, self.num_kv_heads,
        )  # fmt: skip

    def context_features(self, aux: torch.Tensor) -> torch.Tensor:
        """[T, L*Ht] -> [T, H]."""
        return self._rms_norm(self.fc(aux), self.hidden_norm)

    def context_kv(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H], [T] -> keys (normed, rotated) and values [num_layers, T, Hkv, Dh]."""
        shape = (2, len(self.layers), self.num_kv_heads, self.head_dim)
        keys, values = self.context(features).unflatten(-1, shape).permute(1, 2, 0, 3, 4).unbind(0)
        keys = F.rms_norm(keys, (self.head_dim,), eps=self.eps) * self.context_k_norm
        return self._rotate(keys, positions), values

    def block_embeds(self, anchor_embeds: torch.Tensor, rows: int) -> torch.Tensor:
        """[B, H] -> [B, rows, H]: the anchors, then masks."""
        block = self.mask_embedding.expand(anchor_embeds.shape[0], rows, -1).clone()
        block[:, 0] = anchor_embeds
        return block

    def forward(
        self, input_embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """[T, H], [T] -> final normed hidden states [T, H]."""
        if self.joins_rows:
            return self._forward_joined(input_embeds, positions, attend)
        x = input_embeds
        num_qk = self.num_heads + self.num_kv_heads
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._rms_norm(x, layer.input_norm))
            qkv = qkv.unflatten(-1, (num_qk + self.num_kv_heads, self.head_dim))
            qk = F.rms_norm(qkv[:, :num_qk], (self.head_dim,), eps=self.eps) * layer.qk_norm
            qk = self._rotate(qk, positions)
            mixed = attend(index, qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, num_qk:])
            x = x + layer.output(mixed.flatten(-2))
            gate, up = layer.gate_up(self._rms_norm(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return self._rms_norm(x, self.norm)

    __call__ = forward

    def _forward_joined(
        self, input_embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """`forward`, for `kernels.draft_rows`."""
        x = input_embeds.clone()
        num_qk = self.num_heads + self.num_kv_heads
        qkv = x.new_empty(len(x), num_qk + self.num_kv_heads, self.head_dim)
        query, key, value = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        for index, layer in enumerate(self.layers):
            project_heads(
                x, layer.input_norm, layer.qkv, layer.qk_norm, self.rotary, positions, self.eps, qkv
            )
            mixed = attend(index, query, key, value).flatten(-2)
            finish_layer(
                x, mixed, layer.output, layer.post_norm, layer.gate_up, layer.down,
                self.config.intermediate_size, self.eps,
            )  # fmt: skip
        return rms_norm(x, self.norm, self.eps)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotates the two halves of x [..., T, heads, Dh] by the angles of positions [T]."""
        if self.rotated < self.head_dim:
            turned, rest = x.split((self.rotated, self.head_dim - self.rotated), dim=-1)
            return torch.cat((self._turn(turned, positions), rest), dim=-1)
        return self._turn(x, positions)

    def _turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        swapped = x.roll(self.rotated // 2, dims=-1)
        return x * self.cos[positions] + swapped * self.sin[positions]


def _joined(
    linears: list[torch.nn.Linear] | tuple[torch.nn.Linear, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.cat([linear.weight for linear in linears])
    if linears[0].bias is None:
        return weight, None
    return weight, torch.cat([linear.bias for linear in linears])
