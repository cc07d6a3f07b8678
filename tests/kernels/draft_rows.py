# SPDX-License-Identifier: Apache-2.0
"""A small block head's config, and an attention without mixing of rows."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specplug.methods.block.config import BlockHeadConfig

HIDDEN = 96
# Torch rounds in between, kernels once.
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


def config(**changes: Any) -> BlockHeadConfig:
    """Of three layers with six heads."""
    values: dict[str, Any] = dict(
        hidden_size=HIDDEN, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, vocab_size=50, draft_vocab_size=50,
        target_hidden_size=48, target_layer_ids=(0, 2), block_size=5, mask_token_id=1,
    )  # fmt: skip
    return BlockHeadConfig(**{**values, **changes})


def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Row by row."""
    return (q + (layer + 1) * k.repeat_interleave(3, 1)) * 0.3 - v.repeat_interleave(3, 1)
