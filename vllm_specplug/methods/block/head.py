# SPDX-License-Identifier: Apache-2.0
"""The block draft head of JetSpec (causal in the block) and DFlash (bidirectional).

Shapes: T tokens or block slots, L selected target layers, Ht target hidden size, H head hidden
size, Hq/Hkv query/key heads, Dh head size, I MLP width.

One draft round feeds a block: slot 0 is the embedding of the anchor (the newest token, sampled but
not yet in the target's cache), slots 1.. are the mask embedding. The output at slot j predicts the
token *at* slot j, or the next token in heads that sample from the anchor's slot. Each layer attends
the context features of every committed position before the anchor, then the block itself. All
layers read the same context features and none updates them, so a context K/V pair is final once its
position is committed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.rotary import Rotary

__all__ = ["Attend", "BlockHead", "BlockHeadConfig"]

Side = Callable[[torch.Tensor], torch.Tensor]
# attend(layer_idx, q [T, Hq, Dh], k [T, Hkv, Dh], v [T, Hkv, Dh]) -> [T, Hq, Dh]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32, cast back, scaled."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotary_cos_sin(positions: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin of the rotary angles of `positions` [T], each float32 [T, Dh/2], or fewer
    columns if only a part of a head is rotated."""
    frequencies, factor = rotary.frequencies()
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies.to(positions.device)
    return angles.cos() * factor, angles.sin() * factor


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x [T, heads, Dh] with its two halves rotated by angles [T, Dh/2] (neox layout). Fewer
    angles rotate the halves of the leading dimensions."""
    cos, sin = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)
    size = 2 * cos.shape[-1]
    first, second = x[..., :size].chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, x[..., size:]), dim=-1)


class AttentionProjections(nn.Module):
    """Projections of a draft layer, and norms of queries and keys. The caller computes the
    attention.

    Args:
        config: sizes of the layer, and whether q, k and v have a bias.
        input_size: input size of q, k and v.
    """

    def __init__(self, config: Any, input_size: int, output_bias: bool, qk_norm: bool):
        super().__init__()
        self.head_dim = dim = config.head_dim
        inner, kv_inner = config.num_attention_heads * dim, config.num_key_value_heads * dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(input_size, inner, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_inner, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_inner, bias=bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=output_bias)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def query(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[T, input size] -> rotated queries [T, Hq, Dh]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return apply_rotary(self.q_norm(q) if self.qk_norm else q, cos, sin)

    def key_value(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, input size] -> rotated keys and plain values, each [T, Hkv, Dh]."""
        k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.k_proj, self.v_proj))
        return apply_rotary(self.k_norm(k) if self.qk_norm else k, cos, sin), v


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BlockConv(nn.Module):
    """Convolutions along the slots of a block, before and after one sublayer of DFlash2.

    With x [T, H] whole blocks of B slots and s the sublayer's normed input, side 0 or 1 gives

        y[j, c] = sum over taps k of (base[side, k, c] + delta[j, side, k, group of c]) x[j - k, c]

    where delta is a projection of s[j], and slots before the block's first are zero. A new
    convolution returns its input.
    """

    def __init__(self, config: BlockHeadConfig):
        super().__init__()
        taps, hidden = config.conv_kernel_size, config.hidden_size
        self.block_size = config.block_size
        self.delta_shape = (2, taps, hidden // config.conv_group_size)
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, math.prod(self.delta_shape), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, normed: torch.Tensor) -> torch.Tensor:
        """Returns the kernels [2, T, taps, H] float32 of both sides from the sublayer's normed
        input [T, H]."""
        delta = self.kernel_projection(normed).unflatten(-1, self.delta_shape)
        base = self.base_kernel.float().unflatten(-1, (self.delta_shape[-1], -1))
        return (base + delta.unsqueeze(-1)).flatten(-2).transpose(0, 1)

    def convolve(self, x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Returns y [T, H] of x [T, H] and one side's kernel [T, taps, H]."""
        blocks, kernel = (part.unflatten(0, (-1, self.block_size)) for part in (x, kernel))
        y = kernel[:, :, 0] * blocks
        for k in range(1, kernel.shape[2]):
            y[:, k:] += kernel[:, k:, k] * blocks[:, :-k]
        return y.flatten(0, 1).to(x.dtype)


def conv_sides(conv: BlockConv | None, normed: torch.Tensor) -> tuple[Side, Side]:
    """Returns the functions [T, H] -> [T, H] of a sublayer's input and of its output; the identity
    without convolutions."""
    if conv is None:
        return _unchanged, _unchanged
    before, after = conv.kernels(normed)
    return partial(conv.convolve, kernel=before), partial(conv.convolve, kernel=after)


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


class BlockLayer(nn.Module):
    """Pre-norm attention and MLP of one draft layer, in two halves around the attention."""

    def __init__(self, config: BlockHeadConfig):
        super().__init__()
        has_conv = config.conv_kernel_size > 0
        self.attention_conv = BlockConv(config) if has_conv else None
        self.mlp_conv = BlockConv(config) if has_conv else None
        self.self_attn = AttentionProjections(
            config, config.hidden_size, config.attention_bias, qk_norm=True
        )
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the attention's inputs q [T, Hq, Dh], k and v [T, Hkv, Dh] of slots [T, H]."""
        normed = self.input_layernorm(x)
        normed = conv_sides(self.attention_conv, normed)[0](normed)
        k, v = self.self_attn.key_value(normed, cos, sin)
        return self.self_attn.query(normed, cos, sin), k, v

    def finish(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output [T, H] from the attention's output `mixed` [T, Hq, Dh]."""
        attended = self.self_attn.o_proj(mixed.flatten(-2))
        if self.attention_conv is not None:
            attended = conv_sides(self.attention_conv, self.input_layernorm(x))[1](attended)
        x = x + attended
        normed = self.post_attention_layernorm(x)
        before, after = conv_sides(self.mlp_conv, normed)
        return x + after(self.mlp(before(normed)))


def scaled_inputs(input_embeds: torch.Tensor, config: BlockHeadConfig) -> torch.Tensor:
    """Returns embeddings [..., H] times the head's `input_embedding_scale`."""
    scale = config.input_embedding_scale
    return input_embeds if scale == 1 else input_embeds * scale


class BlockHead(nn.Module):
    """Draft head of `config.num_hidden_layers` layers over context features of the target.

    `mask_embedding` [H] is a parameter, or the target's embedding row of
    `config.mask_token_id`, which the loader copies. The target's token embeddings and LM head are
    not part of the head.
    """

    def __init__(self, config: BlockHeadConfig):
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Any: torch types what a list holds as plain modules.
        self.layers: Any = nn.ModuleList(
            BlockLayer(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        mask = torch.zeros(config.hidden_size)
        self.mask_embedding: torch.Tensor
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(mask)
        else:
            self.register_buffer("mask_embedding", mask)

    def context_features(self, aux: torch.Tensor) -> torch.Tensor:
        """Outputs of `target_layer_ids`, concatenated in that order [T, L*Ht] -> [T, H]."""
        return self.hidden_norm(self.fc(aux))

    def context_kv(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns every layer's K (normed, rotated) and V of committed positions.

        [T, H], [T] -> two tensors [num_layers, T, Hkv, Dh]. Rows do not depend on each other, so
        callers only compute new positions.
        """
        cos, sin = rotary_cos_sin(positions, self.config.rotary)
        pairs = [layer.self_attn.key_value(features, cos, sin) for layer in self.layers]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def block_embeds(self, anchor_embeds: torch.Tensor, block_size: int) -> torch.Tensor:
        """Anchor embeddings [B, H] -> block inputs [B, block_size, H] (slot 0, then masks)."""
        masks = self.mask_embedding.to(anchor_embeds.dtype)
        masks = masks.expand(anchor_embeds.shape[0], block_size - 1, -1)
        return torch.cat((anchor_embeds.unsqueeze(1), masks), dim=1)

    def forward(
        self, input_embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Returns the final normed hidden states of block slots.

        Args:
            input_embeds: [T, H], anchor embedding in slot 0 of each block, masks in the others.
                Layers with convolutions need all slots of each block.
            positions: [T] absolute positions; the anchor's is the number of tokens before it.
            attend: called once per layer as `attend(layer_idx, q, k, v)` with the slots' own
                q [T, Hq, Dh], k and v [T, Hkv, Dh]; it adds the context K/V and the block mask
                and returns [T, Hq, Dh]. Its scale is `config.attention_scale`.

        Returns:
            [T, H]; the LM head on slot j gives the distribution of the token at slot j, or of the
            next token.
        """
        cos, sin = rotary_cos_sin(positions, self.config.rotary)
        x = scaled_inputs(input_embeds, self.config)
        for index, layer in enumerate(self.layers):
            q, k, v = layer.project(x, cos, sin)
            x = layer.finish(x, attend(index, q, k, v))
        return self.norm(x)
