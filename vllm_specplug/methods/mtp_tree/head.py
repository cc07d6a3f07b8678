# SPDX-License-Identifier: Apache-2.0
"""A target's multi-token-prediction module: one of its decoder layers behind a projection.

Row i takes the token at position i + 1 and a state of position i, and predicts the token at i + 2.
The state of a committed position is what the target's forward returns: the output of its last
layer, for MiMo before the final norm, for the others after it. The state of a drafted token is the
module's own output. State and embedding are normed, joined in this order and projected to the
layer's input.
"""

from __future__ import annotations

import torch
from torch import nn

from vllm_specplug.drafting.drafter import ExpertProducts, LinearFactory
from vllm_specplug.kernels import multiply_experts, rms_norm
from vllm_specplug.methods.block.fused_parts import plain_linear
from vllm_specplug.methods.block.head import AttentionProjections, GatedMLP, RMSNorm
from vllm_specplug.methods.block.latent import LatentProjections
from vllm_specplug.methods.block.mlp import ExpertMLP
from vllm_specplug.methods.eagle3_tree.head import FusedDraftLayers
from vllm_specplug.methods.mtp_tree.config import MtpConfig


class MtpModule(nn.Module):
    """The module's tensors under MiMo's names, the state before the embedding."""

    def __init__(self, config: MtpConfig):
        super().__init__()
        self.config = config
        norm = (config.hidden_size, config.rms_norm_eps)
        self.token_layernorm = RMSNorm(*norm)
        self.hidden_layernorm = RMSNorm(*norm)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm = RMSNorm(*norm)
        hidden = config.hidden_size
        self.self_attn: nn.Module
        if config.latent is None:
            self.self_attn = AttentionProjections(config, hidden, False, config.qk_norm)
        else:
            heads = config.num_attention_heads
            self.self_attn = LatentProjections(config.latent, heads, hidden, config.rms_norm_eps)
        if config.gated:
            inner = config.num_attention_heads * config.head_dim
            self.self_attn.gate_proj = nn.Linear(hidden, inner, bias=config.attention_bias)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.mlp: nn.Module
        if config.experts is None:
            self.mlp = GatedMLP(hidden, config.intermediate_size)
        else:
            self.mlp = ExpertMLP(config.experts, hidden)
        self.final_layernorm = RMSNorm(*norm)


class FusedMtpModule(FusedDraftLayers):
    """Serving form of an `MtpModule` on its device and in its dtype."""

    def __init__(
        self,
        module: MtpModule,
        max_positions: int,
        make_linear: LinearFactory = plain_linear,
        multiply: ExpertProducts = multiply_experts,
    ) -> None:
        super().__init__(
            module.config, [module], module.final_layernorm, max_positions, make_linear, multiply
        )
        self.input = make_linear(module.input_proj.weight, None)
        self.token_norm = module.token_layernorm.weight
        self.state_norm = module.hidden_layernorm.weight
        self.input_norm = module.input_layernorm.weight

    def _inputs(
        self, embeds: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = rms_norm(states, self.state_norm, self.eps)
        token = rms_norm(embeds, self.token_norm, self.eps)
        x = self.input(torch.cat((state, token), dim=-1))
        return rms_norm(x, self.input_norm, self.eps), x
