# SPDX-License-Identifier: Apache-2.0
"""LongSpec: one draft layer whose memory does not grow with the context.

One forward of the layer per level drafts the frontier of all trees. Self-attention reads the last
`window_size` tokens and the node's own branch; cross-attention reads the target's last-layer KV
cache of the whole context. The drafter rebuilds a missing window from the tokens, so preemption and
prefix-cache hits need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

import torch

from vllm_specplug.drafting.caches import TargetCacheSpec, WindowSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import LinearFactory, TargetWeights
from vllm_specplug.drafting.level_drafter import LevelDrafter
from vllm_specplug.drafting.level_rows import LevelRows
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels.row_ops import add_rms_norm, rms_norm, rotate_heads
from vllm_specplug.methods.block.fused_parts import joined_weights, plain_linear, rotary_tables
from vllm_specplug.methods.block.mlp import FusedMLP
from vllm_specplug.methods.longspec.checkpoint import load_longspec_head
from vllm_specplug.methods.longspec.head import CrossAttend, LongSpecHead, SelfAttend

# Window tokens whose keys and values are computed at once.
MAX_WINDOW_TOKENS = 4096


class FusedLongSpecHead:
    """A `LongSpecHead` for serving: the same sums in fewer, larger matrix products.

    Args:
        head: the loaded head, on its device and in its dtype.
        max_positions: number of positions in the rotary tables.
        make_linear: makes a linear layer from a weight and a bias.
    """

    def __init__(
        self, head: LongSpecHead, max_positions: int, make_linear: LinearFactory = plain_linear
    ) -> None:
        config = head.config
        self.config = config
        self.eps = config.rms_norm_eps
        own, cross = head.self_attn, head.cross_attn
        self.key_value = make_linear(*joined_weights(own.k_proj, own.v_proj))
        self.qkv = make_linear(*joined_weights(own.q_proj, own.k_proj, own.v_proj))
        self.self_output = make_linear(own.o_proj.weight, None)
        self.cross_query = make_linear(cross.q_proj.weight, cross.q_proj.bias)
        self.cross_output = make_linear(cross.o_proj.weight, None)
        self.mlp = FusedMLP(head.mlp, make_linear)
        self.input_norm = head.input_layernorm.weight
        self.cross_norm = head.post_self_attention_layernorm.weight
        self.mlp_norm = head.post_cross_attention_layernorm.weight
        self.norm = head.norm.weight if config.final_norm else None
        self.rotary = rotary_tables(config.rotary, max_positions, self.input_norm)

    def window_kv(
        self, embeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H], [T] -> keys (rotated) and values [T, Hkv, Dh]."""
        shape = (2, self.config.num_key_value_heads, self.config.head_dim)
        normed = rms_norm(embeds, self.input_norm, self.eps)
        key, value = self.key_value(normed).unflatten(-1, shape).unbind(1)
        return rotate_heads(key, *self.rotary, positions), value.contiguous()

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        self_attend: SelfAttend,
        cross_attend: CrossAttend,
    ) -> torch.Tensor:
        """[T, H], [T] -> states [T, H] for the LM head."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        dim = self.config.head_dim
        qkv = self.qkv(rms_norm(embeds, self.input_norm, self.eps)).unflatten(-1, (-1, dim))
        qk = rotate_heads(qkv[:, : heads + kv_heads], *self.rotary, positions)
        mixed = self_attend(qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :])
        x, normed = add_rms_norm(
            embeds, self.self_output(mixed.flatten(-2)), self.cross_norm, self.eps
        )
        query = self.cross_query(normed).unflatten(-1, (heads, dim))
        mixed = cross_attend(rotate_heads(query, *self.rotary, positions))
        x, normed = add_rms_norm(x, self.cross_output(mixed.flatten(-2)), self.mlp_norm, self.eps)
        x = x + self.mlp(normed)
        return x if self.norm is None else rms_norm(x, self.norm, self.eps)

    __call__ = forward


class LongSpecDrafter(LevelDrafter):
    """Drafter of method `longspec`."""

    reads_history: ClassVar[bool] = True

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        assert self.options.head_path is not None
        head, target_ids = load_longspec_head(self.options.head_path, target.text_config)
        head = head.to(device=target.device, dtype=target.dtype)
        self.config = head.config
        self.take_tables(target, target_ids)
        self.lm_head = target.make_lm_head(self.target_ids)
        self.head = FusedLongSpecHead(head, self.options.max_model_len, target.make_linear)

    def window_spec(self) -> WindowSpec:
        size = min(self.config.window_size, self.options.max_model_len)
        return WindowSpec(size, self.config.num_key_value_heads, self.config.head_dim)

    def target_cache_specs(self) -> list[TargetCacheSpec]:
        kv_heads, dim = self.config.num_key_value_heads, self.config.head_dim
        return [TargetCacheSpec(kv_heads, dim, dim**-0.5, must_be_last=True)]

    def observe(self, committed: CommittedTokens) -> None:
        """Does nothing: `prepare_context` reads a request's tokens when it drafts."""

    def forget(self, req_ids: Iterable[str]) -> None:
        req_ids = list(req_ids)
        self.window.forget(req_ids)
        super().forget(req_ids)

    def prepare_context(self, requests: DraftRequests | DeviceRequests) -> None:
        missing = self.window.missing(requests)
        parts = (missing.token_ids, missing.positions, missing.slots)
        # In pieces: new requests need whole windows.
        for token_ids, positions, slots in zip(
            *(part.split(MAX_WINDOW_TOKENS) for part in parts), strict=True
        ):
            if len(token_ids):
                keys, values = self.head.window_kv(self.embed(token_ids), positions)
                self.window.write(keys, values, slots)

    def level_forward(self, rows: LevelRows) -> Callable[[], torch.Tensor]:
        (target_cache,) = self.target_caches

        def forward() -> torch.Tensor:
            return self.head(
                self.embed(rows.token_ids),
                rows.positions(rows.context_lens),
                rows.window_attention(self.window),
                rows.context_attention(target_cache),
            )

        return forward
