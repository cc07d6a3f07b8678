# SPDX-License-Identifier: Apache-2.0
"""LongSpec's draft layer: windowed self-attention, then cross-attention into the target's cache.

Shapes: T tokens or tree nodes, H hidden size, Hq/Hkv query/key heads, Dh head size.

One layer drafts one token at a time (arXiv 2502.17421). A token's embedding attends the drafted and
the last committed tokens before it, then the cached keys and values of the target's last layer at
all committed positions. The keys and values of the layer's self-attention depend only on a token
and its position, so they can be recomputed from the tokens at any time. The draft needs no other
memory than a window of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_specplug.methods.block.head import (
    AttentionProjections,
    GatedMLP,
    RMSNorm,
    apply_rotary,
    rotary_cos_sin,
)
from vllm_specplug.methods.longspec.config import LongSpecConfig

# (q [T, Hq, Dh], k [T, Hkv, Dh], v [T, Hkv, Dh]) -> [T, Hq, Dh]
SelfAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# q [T, Hq, Dh] -> [T, Hq, Dh]
CrossAttend = Callable[[torch.Tensor], torch.Tensor]


class _CrossAttention(nn.Module):
    """Query and output projections; keys and values come from the target."""

    def __init__(self, config: LongSpecConfig):
        super().__init__()
        inner = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.attention_bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)


class LongSpecHead(nn.Module):
    """The draft layer, without the target's token embeddings and LM head."""

    def __init__(self, config: LongSpecConfig):
        super().__init__()
        self.config = config
        norm = (config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(*norm)
        self.self_attn = AttentionProjections(config, config.hidden_size, False, qk_norm=False)
        self.post_self_attention_layernorm = RMSNorm(*norm)
        self.cross_attn = _CrossAttention(config)
        self.post_cross_attention_layernorm = RMSNorm(*norm)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.norm: Any = RMSNorm(*norm) if config.final_norm else nn.Identity()

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        self_attend: SelfAttend,
        cross_attend: CrossAttend,
    ) -> torch.Tensor:
        """Returns states [T, H] from which the LM head computes the distribution of the next token.

        Args:
            embeds: [T, H] target embeddings of the tokens.
            positions: [T] their absolute positions.
            self_attend: attention over the token itself, its drafted ancestors and the window.
            cross_attend: attention over the target's last layer; zeros for an empty context.
        """
        rotary = rotary_cos_sin(positions, self.config.rotary)
        normed, own = self.input_layernorm(embeds), self.self_attn
        mixed = self_attend(own.query(normed, *rotary), *own.key_value(normed, *rotary))
        x = embeds + own.o_proj(mixed.flatten(-2))
        normed = self.post_self_attention_layernorm(x)
        query = self.cross_attn.q_proj(normed).unflatten(-1, (-1, self.config.head_dim))
        query = apply_rotary(query, *rotary)
        x = x + self.cross_attn.o_proj(cross_attend(query).flatten(-2))
        return self.norm(x + self.mlp(self.post_cross_attention_layernorm(x)))
