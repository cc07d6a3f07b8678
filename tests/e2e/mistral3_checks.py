# SPDX-License-Identifier: Apache-2.0
"""Mistral-Small 3 with images in its prompts, on trees against plain decoding; see test_vision.py.

Images come as what the image processor makes of them (`vision_checks`): a Pixtral tower takes
pictures of any shape, and text tokens end the rows of their patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e.pair import Pair, pair, watch_preemptions, watch_prefix_hits
from tests.e2e.vision_checks import TEXTS, compare, have_torchvision
from tests.e2e.wrapper_checks import MERGE, PATCH, mistral3_target

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


def engines(**tree: Any) -> Pair:
    with without_processors():
        return pair("oracle", model=mistral3_target(), limit_mm_per_prompt={"image": 2}, tree=tree)


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


def check_images_of_any_shape() -> None:
    for ahead in (False, True):
        made = engines(async_scheduling=ahead)
        expected, counts = compare(made, prompts())
        # The same text around another image.
        assert expected[4].outputs[0].token_ids != expected[7].outputs[0].token_ids
        assert (counts.stale > 0) == ahead and counts.skipping > 0, counts
    with (
        patch.object(made.runner.tree_backend, "compact", lambda *args: None),
        pytest.raises(AssertionError, match="differs"),
    ):
        compare(made, prompts())


def check_prefix_hits_chunks_and_preemption_with_images() -> None:
    made = engines(
        async_scheduling=True, enable_prefix_caching=True, max_num_batched_tokens=144,
        num_gpu_blocks_override=14,
    )  # fmt: skip
    preempted, hits = watch_preemptions(made.tree), watch_prefix_hits(made.tree)
    for _ in range(2):
        hits.clear()
        compare(made, prompts())
    assert max(hits.values()) >= 32, hits
    assert preempted
