# SPDX-License-Identifier: Apache-2.0
"""A Mistral3 target: a text model behind a wrapper for images."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch

from tests.e2e.tiny import make_tokenizer
from tests.e2e.vision import VOCAB

PATCH, MERGE = 14, 2


@cache
def mistral3_target() -> str:
    """Mistral-Small's classes: a Pixtral tower before a Mistral decoder."""
    import transformers

    torch.manual_seed(0)
    text = transformers.MistralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=512,
        sliding_window=None, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    tower = transformers.PixtralVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=12 * PATCH * MERGE, patch_size=PATCH,
    )  # fmt: skip
    config = transformers.Mistral3Config(
        text_config=text, vision_config=tower, image_token_index=8, spatial_merge_size=MERGE,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Mistral3ForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(2.5)
    folder = tempfile.mkdtemp(prefix="specplug-wrapper-")
    model.save_pretrained(Path(folder))
    assert make_tokenizer(Path(folder)) <= VOCAB
    return folder
