# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 head: decoder layers over a token's embedding and the previous state.

Shapes: T tokens or tree nodes, L target layers, Ht target hidden size, H hidden size of the head,
Hq/Hkv query/key heads, Dh head size.

Row i takes the token at position i + 1 and a state of position i, and predicts the token at
i + 2 (arXiv 2503.01840). The state of a committed position is computed from the target's outputs at
L layers, the state of a drafted token is the head's own output for it. So the keys and values of
position i depend on the token after it. Only the first layer reads embeddings and states, the
others read the output of the layer before them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from vllm_specplug.drafting.drafter import ExpertProducts, LinearFactory
from vllm_specplug.kernels import multiply_experts, rms_norm
from vllm_specplug.methods.block.fused_layer import FusedLayer
from vllm_specplug.methods.block.fused_parts import joined_weights, plain_linear, rotary_tables
from vllm_specplug.methods.block.head import (
    Attend,
    AttentionProjections,
    GatedMLP,
    RMSNorm,
    rotary_cos_sin,
)
from vllm_specplug.methods.block.latent import FusedLatentProjections
from vllm_specplug.methods.eagle3_tree.config import Eagle3Config


class Eagle3Layer(nn.Module):
    """A decoder layer. The first layer norms embeddings by `input_layernorm` and states by
    `hidden_norm`; the others only have the first of these norms."""

    def __init__(self, config: Eagle3Config, is_first: bool):
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(*norm)
        if is_first:
            self.hidden_norm = RMSNorm(*norm)
        self.self_attn = AttentionProjections(
            config, (1 + is_first) * config.hidden_size, config.attention_bias, config.qk_norm
        )
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)


class Eagle3Head(nn.Module):
    """The head without token embeddings and LM head."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        eps = config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_size, eps)
        if config.fc_norm:
            # Any: torch types what a list holds as plain modules.
            self.fc_norm: Any = nn.ModuleList(
                RMSNorm(config.target_hidden_size, eps) for _ in config.target_layer_ids
            )
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.layers: Any = nn.ModuleList(
            Eagle3Layer(config, is_first=i == 0) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps)
        if config.mask_token_id is not None:
            # Takes the place of the target's outputs for tokens that are drafted in parallel.
            self.mask_hidden = nn.Parameter(torch.zeros(config.feature_size))

    def features(self, aux: torch.Tensor) -> torch.Tensor:
        """Joined target states of committed positions [T, L*Ht] -> states [T, H]."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def _inputs(
        self, embeds: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the attention's input [T, 2H] and the residual [T, H]."""
        layer = self.layers[0]
        normed = layer.hidden_norm(states)
        joined = torch.cat((layer.input_layernorm(embeds), normed), dim=-1)
        return joined, normed if self.config.norm_before_residual else states

    def _run(
        self,
        count: int,
        embeds: torch.Tensor,
        states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the first `count` layers. Returns their output after the next norm, and before
        it."""
        x, residual = self._inputs(embeds, states)
        norms = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        for i, (layer, norm) in enumerate(zip(self.layers[:count], norms, strict=False)):
            assert attend is not None
            attn = layer.self_attn
            mixed = attend(i, attn.query(x, *rotary), *attn.key_value(x, *rotary))
            residual = residual + attn.o_proj(mixed.flatten(-2))
            residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
            x = norm(residual)
        return x, residual

    def context_kv(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys (rotated) and values of rows in the last layer.

        Args:
            embeds: [T, H], of the token after each position.
            states: [T, H].
            positions: [T].
            attend: called for each layer before the last one, with the rows' q [T, Hq, Dh], k and v
                [T, Hkv, Dh].

        Returns:
            Two tensors [T, Hkv, Dh].
        """
        rotary = rotary_cos_sin(positions, self.config.rotary)
        x, _ = self._run(len(self.layers) - 1, embeds, states, rotary, attend)
        key, value = self.layers[-1].self_attn.key_value(x, *rotary)
        return key, value

    def forward(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs rows, with the arguments of `context_kv` and attention over context and branch in
        every layer.

        Returns:
            Inputs of the LM head [T, H], and the tokens' states [T, H] for their children.
        """
        rotary = rotary_cos_sin(positions, self.config.rotary)
        x, residual = self._run(len(self.layers), embeds, states, rotary, attend)
        return x, x if self.config.norm_output else residual


class FusedDraftLayers(ABC):
    """Decoder layers over a token's embedding and the previous state, for serving: the same sums in
    fewer, larger matrix products. See `Eagle3Head` for shapes and meaning.

    Args:
        config: sizes of a layer, `rotary` and `norm_output`.
        layers: see `FusedLayer`; those after the first one also have an `input_layernorm`.
        norm: the norm before the LM head.
        max_positions: positions that the rotary tables cover.
    """

    def __init__(
        self,
        config: Any,
        layers: Sequence[Any],
        norm: RMSNorm,
        max_positions: int,
        make_linear: LinearFactory,
        multiply: ExpertProducts = multiply_experts,
    ) -> None:
        self.shape, self.eps = config, config.rms_norm_eps
        rotary = rotary_tables(config.rotary, max_positions, norm.weight)
        self.layers = [FusedLayer(config, x, rotary, make_linear, multiply) for x in layers]
        last, qkv = layers[-1].self_attn, self.layers[-1].qkv
        self.key_value: Callable[[torch.Tensor], torch.Tensor]
        if isinstance(qkv, FusedLatentProjections):
            self.key_value = qkv.key_value
        else:
            self.key_value = make_linear(*joined_weights(last.k_proj, last.v_proj))
        # Weight of the norm applied to each layer's output
        self.next_norms = [*(layer.input_layernorm.weight for layer in layers[1:]), norm.weight]

    @abstractmethod
    def _inputs(
        self, embeds: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the projections' input and the residual [T, H]; both arguments are [T, H]."""

    def _run(
        self,
        count: int,
        embeds: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the first `count` layers. Returns their output after the next norm, and before
        it."""
        x, residual = self._inputs(embeds, states)
        for i, layer in enumerate(self.layers[:count]):
            x, residual = layer.run(x, residual, positions, partial(attend, i), self.next_norms[i])
        return x, residual

    def context_kv(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] twice, [T] -> keys (rotated) and values [T, Hkv, Dh] of the last layer. Attends in
        the layers before it."""
        x, _ = self._run(len(self.layers) - 1, embeds, states, positions, attend)
        shape = (2, self.shape.num_key_value_heads, self.shape.head_dim)
        key, value = self.key_value(x).unflatten(-1, shape).unbind(1)
        return self.layers[-1].rotate(key, positions), value.contiguous()

    def forward(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] twice, [T] -> [T, H] for the LM head, and states [T, H]."""
        normed, x = self._run(len(self.layers), embeds, states, positions, attend)
        return normed, normed if self.shape.norm_output else x

    __call__ = forward


class FusedEagle3Head(FusedDraftLayers):
    """Serving form of an `Eagle3Head` on its device and in its dtype."""

    def __init__(
        self, head: Eagle3Head, max_positions: int, make_linear: LinearFactory = plain_linear
    ) -> None:
        config, layer = head.config, head.layers[0]
        super().__init__(config, head.layers, head.norm, max_positions, make_linear)
        self.config = config
        self.fc = make_linear(head.fc.weight, None)
        self.joined_norm = head.input_norm.weight if config.norm_before_fc else None
        # [L * Ht]
        self.fc_norm = torch.cat([n.weight for n in head.fc_norm]) if config.fc_norm else None
        self.embed_norm, self.hidden_norm = layer.input_layernorm.weight, layer.hidden_norm.weight
        # [1, H], of a P-EAGLE head
        self.mask_state = None
        if config.mask_token_id is not None:
            self.mask_state = self.features(head.mask_hidden[None])

    def features(self, aux: torch.Tensor) -> torch.Tensor:
        """[T, L*Ht] -> [T, H]."""
        if self.joined_norm is not None:
            aux = rms_norm(aux, self.joined_norm, self.eps)
        if self.fc_norm is not None:
            size = self.config.target_hidden_size
            aux = rms_norm(aux, self.fc_norm, self.eps, size)
        return self.fc(aux)

    def _inputs(
        self, embeds: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = rms_norm(states, self.hidden_norm, self.eps)
        joined = torch.cat((rms_norm(embeds, self.embed_norm, self.eps), normed), dim=-1)
        return joined, normed if self.config.norm_before_residual else states
