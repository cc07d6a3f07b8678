# SPDX-License-Identifier: Apache-2.0
"""A block head for serving: the same sums in fewer, larger matrix products.

Launches and weight bytes bound the drafting of one block, not arithmetic. Projections that read the
same input are joined (q, k, v; gate, up; the context keys and values of all layers), and rotary
tables are computed once. `kernels.row_ops` computes norms, rotations and activations between two
products; `kernels.draft_rows` joins them with packed int8 products. `methods.block.head.BlockHead`
is the readable version and the oracle.
"""

from __future__ import annotations

from functools import partial

import torch

from vllm_specplug.drafting.drafter import LinearFactory
from vllm_specplug.kernels.draft_rows import (
    can_join_rows,
    context_heads,
    finish_layer,
    project_heads,
)
from vllm_specplug.kernels.row_ops import norm_rotate_heads, rms_norm
from vllm_specplug.methods.block.fused_layer import FusedLayer
from vllm_specplug.methods.block.fused_parts import joined_weights, plain_linear, rotary_tables
from vllm_specplug.methods.block.head import Attend, BlockHead, scaled_inputs


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
        self.rotary = rotary_tables(config.rotary, max_positions, self.norm)
        self.layers = [FusedLayer(config, x, self.rotary, make_linear) for x in head.layers]
        # The norms before the layers, and the last one
        self.norms = [*(layer.input_layernorm.weight for layer in head.layers), self.norm]
        products = [self.fc, self.context]
        for layer in self.layers:
            products += (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
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
        normed = rms_norm(x, self.norms[0], self.eps)
        for i, (layer, next_norm) in enumerate(zip(self.layers, self.norms[1:], strict=True)):
            normed, x = layer.run(normed, x, positions, partial(attend, i), next_norm)
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
                x, self.norms[index], layer.qkv, layer.qk_norm, self.rotary, positions, self.eps,
                qkv,
            )  # fmt: skip
            mixed = attend(index, query, key, value).flatten(-2)
            finish_layer(
                x, mixed, layer.output, layer.mlp_norm, layer.mlp.gate_up, layer.mlp.down,
                self.config.intermediate_size, self.eps,
            )  # fmt: skip
        return rms_norm(x, self.norm, self.eps)
