# SPDX-License-Identifier: Apache-2.0
"""A tiny block head and the embeddings of its target."""

from __future__ import annotations

import torch

from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.start import head_config_for
from vllm_specplug.train.target import TargetWeights


def make_head(target_folder, block_size=4, causal=True):
    weights = TargetWeights(target_folder)
    config = head_config_for(
        weights.config,
        (0, 2),
        num_layers=2,
        block_size=block_size,
        draft_vocab_size=64,
        causal=causal,
    )
    torch.manual_seed(3)
    return BlockHead(config).eval(), weights.tables().embed_tokens.float()
