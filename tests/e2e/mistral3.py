# SPDX-License-Identifier: Apache-2.0
"""Prompts with images for a Mistral3 target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.e2e.vision import TEXTS, have_torchvision
from tests.e2e.wrappers import MERGE, PATCH

IMAGE, BREAK, END = 8, 9, 7


@contextmanager
def without_processors() -> Iterator[None]:
    """Engines that start inside ask no image processor how large an image can be."""
    have_torchvision()
    from vllm.model_executor.models.mistral3 import Mistral3ProcessingInfo

    stock = Mistral3ProcessingInfo.get_mm_max_tokens_per_item
    Mistral3ProcessingInfo.get_mm_max_tokens_per_item = lambda *_, **__: {"image": 64}
    try:
        yield
    finally:
        Mistral3ProcessingInfo.get_mm_max_tokens_per_item = stock


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
    """Text alone, and images of several shapes before, between and behind text; one twice."""
    from vllm.inputs import tokens_input

    return [
        *(tokens_input(text) for text in TEXTS),
        with_image(TEXTS[0], TEXTS[1], 1, 4, 6),
        with_image([], TEXTS[2], 2, 7, 3),
        with_image(list(range(30, 60)), TEXTS[3], 3, 5, 5),
        with_image(TEXTS[0], TEXTS[1], 4, 4, 6),
    ]
