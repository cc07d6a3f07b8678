# SPDX-License-Identifier: Apache-2.0
"""Images in prompts and positions on three axes, on trees of the V2 runner; see test_vision.py."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.pair import Pair, core_of, watch_preemptions, watch_prefix_hits
from tests.e2e.vision_checks import compare, prompts, two_images, vision_engines
from vllm_specplug.vllm_v2 import runner as runner_module
from vllm_specplug.vllm_v2.plain_engine import use_v2

use_v2()


def engines(*, ahead: bool, family: str = "Qwen2_5_VL", **tree: Any) -> Pair:
    made = vision_engines(family, tree={"async_scheduling": ahead, **tree})
    name = type(core_of(made.tree).scheduler).__name__
    assert name == ("AsyncScheduler" if ahead else "Scheduler")
    return made


def check_images_and_positions_on_three_axes() -> None:
    for ahead in (False, True):
        expected, counts = compare(engines(ahead=ahead), [*prompts(), two_images()])
        # The same text around another image.
        assert expected[4].outputs[0].token_ids != expected[7].outputs[0].token_ids
        assert (counts.stale > 0) == ahead and counts.skipping > 0, counts


def check_positions_on_wrong_axes_differ() -> None:
    made, stock = engines(ahead=False), runner_module.set_axes
    for wrong in (
        # Linear, as vLLM gives them.
        lambda trees, positions: None,
        # On one axis alone.
        lambda trees, positions: stock(trees, positions[:1]),
    ):
        with (
            patch.object(runner_module, "set_axes", wrong),
            pytest.raises(AssertionError, match="differs"),
        ):
            compare(made, prompts())


def check_prefix_hits_chunks_and_preemption_with_images() -> None:
    for ahead in (False, True):
        made = engines(
            ahead=ahead, enable_prefix_caching=True, max_num_batched_tokens=144,
            num_gpu_blocks_override=14,
        )  # fmt: skip
        preempted, hits = watch_preemptions(made.tree), watch_prefix_hits(made.tree)
        for _ in range(2):
            hits.clear()
            compare(made, prompts())
        assert max(hits.values()) >= 32, hits
        assert preempted


def check_layers_that_see_the_image_again() -> None:
    """Qwen3-VL adds features of the tower's layers to the first layers' outputs."""
    compare(engines(ahead=False, family="Qwen3VL"), prompts())
