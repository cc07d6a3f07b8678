# SPDX-License-Identifier: Apache-2.0
"""The serving form of a head computes what the readable form computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.fused_head import FusedBlockHead
from vllm_specplug.methods.block.head import BlockHead

CONVOLVED = {"conv_kernel_size": 3, "conv_group_size": 8, "input_embedding_scale": 1.5}


@pytest.mark.parametrize("own", [{}, {"attention_bias": True}, CONVOLVED])
def test_fused_equals_readable(own: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = BlockHeadConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, vocab_size=50, draft_vocab_size=50,
        target_hidden_size=32, target_layer_ids=(0, 2), block_size=4, mask_token_id=1, **own,
    )  # fmt: skip
    head = BlockHead(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    fused = FusedBlockHead(head, max_positions=64)

    positions = torch.tensor([3, 11, 40, 7, 12, 13, 63])
    aux = torch.randn(7, 64)
    features = head.context_features(aux)
    torch.testing.assert_close(fused.context_features(aux), features)
    for ours, theirs in zip(
        fused.context_kv(features, positions), head.context_kv(features, positions), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    seen: list[tuple[torch.Tensor, ...]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((q, k, v))
        return q * (layer + 1) + k.repeat_interleave(3, 1) - v.repeat_interleave(3, 1)

    anchors = torch.randn(2, 48)
    block = head.block_embeds(anchors, 4)
    where = torch.tensor([5, 6, 7, 8, 30, 31, 32, 33])
    expected = head(block.flatten(0, 1), where, attend)
    actual = fused(block.flatten(0, 1), where, attend)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(seen[3:], seen[:3], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
