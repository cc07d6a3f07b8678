# SPDX-License-Identifier: Apache-2.0
"""A random two-layer Llama with a small vocabulary, as a target that starts fast."""

from __future__ import annotations

from pathlib import Path

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 1, 32


def make_target(folder: Path, vocab_size: int, *, num_layers: int = 2, seed: int = 0) -> Path:
    """Writes a random float32 Llama with peaked next-token distributions; returns `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(  # type: ignore[no-untyped-call]
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
