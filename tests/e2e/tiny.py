# SPDX-License-Identifier: Apache-2.0
"""A random two-layer Llama with a small vocabulary, and random heads for it."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_specplug.models.block_config import BlockHeadConfig
from vllm_specplug.models.block_head import BlockHead
from vllm_specplug.models.checkpoint import save_block_head

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 1, 32


def make_target(folder: Path, vocab_size: int, *, num_layers: int = 2, seed: int = 0) -> Path:
    """A random float32 Llama whose next-token distributions are peaked, not uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=HIDDEN,
            intermediate_size=128,
            num_hidden_layers=num_layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(2.5)
    model.save_pretrained(folder)
    return folder


def make_head(
    folder: Path, vocab_size: int, *, causal: bool = True, block_size: int = 5, seed: int = 1
) -> Path:
    """A random block head for `make_target`'s model."""
    torch.manual_seed(seed)
    head = BlockHead(
        BlockHeadConfig(
            hidden_size=HIDDEN,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            target_hidden_size=HIDDEN,
            target_layer_ids=(0, 1),
            block_size=block_size,
            causal=causal,
            mask_token_id=2,
        )
    )
    with torch.no_grad():
        head.mask_embedding.normal_()
    save_block_head(folder, head, dtype=torch.float32)
    return folder
