# SPDX-License-Identifier: Apache-2.0
"""Prompts with images for a Mistral3 target."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from tests.e2e import vision
from tests.e2e.wrappers import MERGE, PATCH

IMAGE, BREAK, END = 8, 9, 7


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
