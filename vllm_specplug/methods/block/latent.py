# SPDX-License-Identifier: Apache-2.0
"""Projections of a draft layer with multi-head latent attention (MLA).

Queries, and keys and values together, are products of compressed rows; one rotated key of each
token is shared by all heads (DeepSeek-V2, arXiv:2405.04434, section 2.1). Draft layers store the
keys and values of every head. Compressed rows would be smaller, but the kernels for draft rows
serve no head of their size, and those for latent rows read a row's own key from the cache.

Shapes: T rows, H hidden size, Hq heads, P rotated numbers of a query or key, N others, Dh = P + N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_specplug.drafting.drafter import LinearFactory
from vllm_specplug.drafting.head_config import require, required_size
from vllm_specplug.kernels import rms_norm
from vllm_specplug.methods.block.fused_parts import joined_weights
from vllm_specplug.methods.block.head import RMSNorm


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of latent attention, under their published names."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> LatentConfig:
        """Returns the sizes in a parsed `config.json`.

        Raises:
            ValueError: for a missing or illegal size, and for values wider than keys.
        """
        sizes = {name: required_size(raw, name) for name in cls.__dataclass_fields__}
        made = cls(**sizes)
        rotated = made.qk_rope_head_dim
        require(rotated % 2 == 0, "qk_rope_head_dim", rotated, "an even number")
        legal = f"1..{made.head_dim} (qk_nope_head_dim + qk_rope_head_dim)"
        require(made.v_head_dim <= made.head_dim, "v_head_dim", made.v_head_dim, legal)
        return made

    @property
    def head_dim(self) -> int:
        """The size Dh of queries and keys, to which values are padded in the cache."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class LatentProjections(nn.Module):
    """The tensors of the attention, under DeepSeek's names.

    The rotated numbers of a query come first, and the two numbers that an angle rotates are P / 2
    apart. `o_proj` reads heads of Dh numbers.
    """

    def __init__(self, config: LatentConfig, num_heads: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.config, self.num_heads, self.eps = config, num_heads, eps
        query, latent, rotated = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
        up = num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.q_a_proj = nn.Linear(hidden, query, bias=False)
        self.q_a_layernorm = RMSNorm(query, eps)
        self.q_b_proj = nn.Linear(query, num_heads * config.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent + rotated, bias=False)
        self.kv_a_layernorm = RMSNorm(latent, eps)
        self.kv_b_proj = nn.Linear(latent, up, bias=False)
        self.o_proj = nn.Linear(num_heads * config.head_dim, hidden, bias=False)


class FusedLatentProjections:
    """Serving form of `LatentProjections`: rows [T, H] -> queries, keys and values of all heads,
    [T, 3 * Hq * Dh]. Queries and keys are not rotated yet."""

    def __init__(self, attn: LatentProjections, make_linear: LinearFactory) -> None:
        self.config, self.num_heads, self.eps = attn.config, attn.num_heads, attn.eps
        self.down = make_linear(*joined_weights(attn.q_a_proj, attn.kv_a_proj_with_mqa))
        self.query_up = make_linear(attn.q_b_proj.weight, None)
        self.key_value_up = make_linear(attn.kv_b_proj.weight, None)
        self.query_norm, self.norm = attn.q_a_layernorm.weight, attn.kv_a_layernorm.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        size = self.config.q_lora_rank
        rows = self.down(x)
        query = self.query_up(rms_norm(rows[:, :size], self.query_norm, self.eps))
        return torch.cat((query, self._expanded(rows[:, size:])), dim=-1)

    def key_value(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> keys, then values of all heads [T, 2 * Hq * Dh]."""
        return self._expanded(self.down(x)[:, self.config.q_lora_rank :])

    def _expanded(
        self,
        # [T, kv_lora_rank + P]
        rows: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        latent, rotated = rows.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        heads = self.key_value_up(rms_norm(latent, self.norm, self.eps))
        heads = heads.unflatten(-1, (self.num_heads, -1))
        content, value = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)
        rotated = rotated.unsqueeze(1).expand(-1, self.num_heads, -1)
        key = torch.cat((rotated, content), dim=-1)
        value = F.pad(value, (0, config.head_dim - config.v_head_dim))
        return torch.cat((key, value), dim=1).flatten(1)
