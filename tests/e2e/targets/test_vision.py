# SPDX-License-Identifier: Apache-2.0
"""Multimodal targets with images in their prompts, on trees against plain decoding.

Images come as what an image processor makes of them: the processors of these families need
torchvision, and so does the import of their models. Where it is missing, modules without any
function of its stand in for it.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tests.e2e import mistral3
from tests.e2e.pair import pair, watch_preemptions, watch_prefix_hits
from tests.e2e.vision import compare, prompts, two_images, vision_engines

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


def test_images_and_positions_on_three_axes() -> None:
    for ahead in (False, True):
        made = vision_engines(tree={"async_scheduling": ahead})
        expected, counts = compare(made, [*prompts(), two_images()])
        # The same text around another image.
        assert expected[4].outputs[0].token_ids != expected[7].outputs[0].token_ids
        assert (counts.stale > 0) == made.is_ahead == ahead and counts.skipping > 0, counts


def test_positions_on_wrong_axes_differ() -> None:
    from vllm_specplug.vllm_v2 import model_state

    made, stock = vision_engines(tree={"async_scheduling": False}), model_state.set_axes
    for wrong in (
        # Linear, as vLLM gives them.
        lambda trees, positions: None,
        # On one axis alone.
        lambda trees, positions: stock(trees, positions[:1]),
    ):
        with (
            patch.object(model_state, "set_axes", wrong),
            pytest.raises(AssertionError, match="differs"),
        ):
            compare(made, prompts())


def test_prefix_hits_chunks_and_preemption_with_images() -> None:
    for ahead in (False, True):
        tree = {"enable_prefix_caching": True, "max_num_batched_tokens": 144,
                "num_gpu_blocks_override": 14, "async_scheduling": ahead}  # fmt: skip
        made = vision_engines(tree=tree)
        preempted, hits = watch_preemptions(made.tree), watch_prefix_hits(made.tree)
        for _ in range(2):
            hits.clear()
            compare(made, prompts())
        assert max(hits.values()) >= 32, hits
        assert preempted


def test_layers_that_see_the_image_again() -> None:
    """Qwen3-VL adds features of the tower's layers to the first layers' outputs."""
    compare(vision_engines("Qwen3VL"), prompts())


def test_images_of_any_shape() -> None:
    """Mistral-Small 3: a Pixtral tower, and text tokens that end the rows of its patches."""
    images = {"image": 2}
    for ahead in (False, True):
        with mistral3.without_processors():
            made = pair(
                "oracle", model=mistral3.mistral3_target(), limit_mm_per_prompt=images,
                tree={"async_scheduling": ahead},
            )  # fmt: skip
        expected, counts = compare(made, mistral3.prompts())
        # The same text around another image.
        assert expected[4].outputs[0].token_ids != expected[7].outputs[0].token_ids
        assert (counts.stale > 0) == ahead and counts.skipping > 0, counts
    with (
        patch.object(made.runner.tree_backend, "compact", lambda *args: None),
        pytest.raises(AssertionError, match="differs"),
    ):
        compare(made, mistral3.prompts())
