# SPDX-License-Identifier: Apache-2.0
"""A Mistral3 target, a text model behind a wrapper for images, and prompts with images for it."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.e2e import vision
from tests.e2e.tiny import make_tokenizer

IMAGE, BREAK, END = 8, 9, 7
PATCH, MERGE = 14, 2


@cache
def mistral3_target() -> str:
    """Mistral-Small's classes: a Pixtral tower before a Mistral decoder."""
    import transformers

    torch.manual_seed(0)
    text = transformers.MistralConfig(
        vocab_size=vision.VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
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
    assert make_tokenizer(Path(folder)) <= vision.VOCAB
    return folder


def without_processors() -> Any:
    """Engines that start inside ask no image processor how large an image can be."""
    vision.have_torchvision()
    from vllm.model_executor.models.mistral3 import Mistral3ProcessingInfo

    return patch.object(
        Mistral3ProcessingInfo, "get_mm_max_tokens_per_item", lambda *_, **__: {"image": 64}
    )


def with_image(before: list[int], after: list[int], seed: int, rows: int, columns: int) -> Any:
    """A prompt with an image of `rows` by `columns` merged patches, as processors give it."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    size = PATCH * MERGE
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(1, 3, rows * size, columns * size, generator=generator)
    image = torch.tensor([*[IMAGE] * columns, BREAK] * rows)
    image[-1] = END
    return mm_input(
        [*before, *image.tolist(), *after],
        MultiModalKwargsItems.from_hf_inputs(
            {"pixel_values": 3 * pixels}, {"pixel_values": MultiModalFieldConfig.batched("image")}
        ),
        {"image": [f"{seed}-{rows}-{columns}"]},
        {
            "image": [
                PlaceholderRange(offset=len(before), length=len(image), is_embed=image == IMAGE)
            ]
        },
    )


def prompts() -> list[Any]:
    return vision.prompts(with_image)
