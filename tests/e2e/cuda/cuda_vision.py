# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines on targets with images as on CUDA; they need fixtures `device_states` and
`device_axes`. vLLM's vision towers run as they do on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.e2e import vision
from tests.e2e.cuda import cuda_device, cuda_pairs
from tests.e2e.hybrids import wrapped_hybrid
from tests.e2e.pair import Counts, Pair
from tests.e2e.vision import compare_answers


def engines(
    method: str = "oracle", *, ahead: bool, family: str = "Qwen2_5_VL", **options: Any
) -> Pair:
    make = partial(wrapped_hybrid, size=16) if family == "Qwen3_5" else vision.vision_target
    with vision.without_processors():
        target = {
            "model": make(family),
            "limit_mm_per_prompt": {"image": 2, "video": 0},
            **cuda_device.tower_arguments(),
            **(cuda_device.state_arguments() if family == "Qwen3_5" else {}),
        }
        return cuda_pairs.engines(method, ahead=ahead, target=target, **options)


def prompts() -> list[Any]:
    """Text, an image, two of them, and the first one's text around another; prompts with images are
    longer than a step, which may end inside one."""
    every = vision.prompts()
    return [every[0], every[4], vision.two_images(), every[7]]


def compare(made: Pair, inputs: list[Any], ahead: bool) -> Counts:
    expected, counts = compare_answers(made, inputs, max_tokens=14, logprobs=2, detokenize=False)
    # The same text around another image.
    assert expected[1].outputs[0].token_ids != expected[3].outputs[0].token_ids
    assert counts.accepted > 10 and counts.skipping > 2, counts
    assert (counts.stale > 0) == ahead, counts
    return counts
