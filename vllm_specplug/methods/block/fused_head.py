# SPDX-License-Identifier: Apache-2.0
"""A block head for serving: the same sums in fewer, larger matrix products.

Launches and weight bytes bound the drafting of one block, not arithmetic. Projections that read the
same input are joined (q, k, v; gate, up; the context keys and values of all layers), and rotary
tables are computed once. `kernels.row_ops` computes norms, rotations and activations between two
products; `kernels.draft_rows` joins them with packed int8 products. `methods.block.head.BlockHead`
is the readable version and the oracle.
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
from vllm_specplug.kernels.row_ops import add_rms_norm, gated_silu, norm_rotate_heads, rms_norm
from vllm_specplug.methods.block.head import (
    Attend,
    BlockHead,
    BlockLayer,
    conv_sides,
    rotary_cos_sin,
    scaled_inputs,
)
from vllm_specplug.methods.block.rotary import Rotary


def plain_linear(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns torch's own linear layer."""
    return lambda x: F.linear(x, weight, bias)


def joined_weights(*linears: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight and bias of one linear layer that computes the outputs of all `linears`."""
    weight = torch.cat([linear.weight for linear in linears])
    if linears[0].bias is None:
        return weight, None
    return weight, torch.cat([linear.bias for linear in linears])


def rotary_tables(rotary: Rotary, max_positions: int, like: torch.Tensor) -> RotaryTables:
    """Returns the tables for positions below `max_positions`, with device and dtype of `like`."""
    return _tables(*rotary_cos_sin(torch.arange(max_positions), rotary), like)


def tables_of_angles(angles: torch.Tensor, like: torch.Tensor) -> RotaryTables:
    """Returns the tables for angles [P, Dh/2], with device and dtype of `like`."""
    return _tables(angles.cos(), angles.sin(), like)


def _tables(cos: torch.Tensor, sin: torch.Tensor, like: torch.Tensor) -> RotaryTables:
    # Both halves: a rotation is two products and a sum.
    return RotaryTables(torch.cat((cos, cos), -1).to(like), torch.cat((-sin, sin), -1).to(like))


class _FusedLayer:
    """One draft layer's packed weights."""

    def __init__(self, layer: BlockLayer, make_linear: LinearFactory) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self.qkv = make_linear(*joined_weights(attn.q_proj, attn.k_proj, attn.v_proj))
        self.output = make_linear(attn.o_proj.weight, attn.o_proj.bias)
        self.gate_up = make_linear(*joined_weights(mlp.gate_proj, mlp.up_proj))
        self.down = make_linear(mlp.down_proj.weight, None)
        self.products = (self.qkv, self.output, self.gate_up, self.down)
        # [Hq + Hkv, Dh]: one call norms and rotates queries and keys
        self.qk_norm = torch.cat(
            (
                attn.q_norm.weight.expand(attn.num_heads, -1),
                attn.k_norm.weight.expand(attn.num_kv_heads, -1),
            )
        ).contiguous()
        self.input_norm = layer.input_layernorm.weight
        self.post_norm = layer.post_attention_layernorm.weight
        self.attention_conv, self.mlp_conv = layer.attention_conv, layer.mlp_conv


class FusedBlockHead:
    """Serving form of a `BlockHead`; see there for shapes and meaning of each method.

    Args:
        head: the loaded head, on its device and in its dtype.
        max_positions: positions the rotary tables cover.
        make_linear: makes a linear layer from a weight and a bias; the runtime passes one that
            packs weights for the device.
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
            *joined_weights(*(a.k_proj for a in attentions), *(a.v_proj for a in attentions))
        )
        # [num_layers, Dh], and [num_layers * Hkv, Dh]
        self.key_norms = torch.stack([a.k_norm.weight for a in attentions])
        self.context_key_norm = self.key_norms.repeat_interleave(self.num_kv_heads, 0)
        self.layers = [_FusedLayer(layer, make_linear) for layer in head.layers]
        # The norm after each layer
        self.next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        self.rotary = rotary_tables(config.rotary, max_positions, self.norm)
        products = [self.fc, self.context, *(p for layer in self.layers for p in layer.products)]
        self.joins_rows = not config.conv_kernel_size and can_join_rows(
            products, self.head_dim, config.rotary.rotated, self.norm.dtype
        )
        """Whether `kernels.draft_rows` joins norms, rotations and sums with the products."""

    def context_heads(
        self, aux: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `context_kv` of the `context_features` of aux [T, L*Ht]."""
        if not self.joins_rows:
            return self.context_kv(self.context_features(aux), positions)
        return context_heads(
            aux, self.fc, self.hidden_norm, self.context, self.key_norms, self.rotary, positions,
            self.eps, self.num_kv_heads,
        )  # fmt: skip

    def context_features(self, aux: torch.Tensor) -> torch.Tensor:
        """[T, L*Ht] -> [T, H]."""
        return rms_norm(self.fc(aux), self.hidden_norm, self.eps)

    def context_kv(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H], [T] -> keys (normed, rotated) and values [num_layers, T, Hkv, Dh]."""
        layers = (len(self.layers), self.num_kv_heads)
        heads = self.context(features).unflatten(-1, (-1, self.head_dim))
        keys, values = heads.chunk(2, dim=1)
        keys = norm_rotate_heads(keys, self.context_key_norm, *self.rotary, positions, self.eps)
        keys, values = (kv.unflatten(1, layers).transpose(0, 1) for kv in (keys, values))
        return keys, values

    def forward(
        self, input_embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """[T, H], [T] -> final normed hidden states [T, H]."""
        x = scaled_inputs(input_embeds, self.config)
        if self.joins_rows:
            return self._forward_joined(x, positions, attend)
        normed = rms_norm(x, self.layers[0].input_norm, self.eps)
        num_qk = self.num_heads + self.num_kv_heads
        for index, (layer, next_norm) in enumerate(zip(self.layers, self.next_norms, strict=True)):
            before, after = conv_sides(layer.attention_conv, normed)
            qkv = layer.qkv(before(normed)).unflatten(
                -1, (num_qk + self.num_kv_heads, self.head_dim)
            )
            qk = norm_rotate_heads(
                qkv[:, :num_qk], layer.qk_norm, *self.rotary, positions, self.eps
            )
            mixed = attend(index, qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, num_qk:])
            delta = after(layer.output(mixed.flatten(-2)))
            x, normed = add_rms_norm(x, delta, layer.post_norm, self.eps)
            before, after = conv_sides(layer.mlp_conv, normed)
            delta = after(layer.down(gated_silu(layer.gate_up(before(normed)))))
            x, normed = add_rms_norm(x, delta, next_norm, self.eps)
        return normed

    __call__ = forward

    def _forward_joined(
        self, input_embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """`forward` on `kernels.draft_rows`."""
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
