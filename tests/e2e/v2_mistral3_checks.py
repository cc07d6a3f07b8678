# SPDX-License-Identifier: Apache-2.0
"""Mistral-Small 3 with images, on trees of the V2 runner; see test_vision.py."""

from __future__ import annotations

from tests.e2e.mistral3_checks import compare, engines, images_matter, prompts
from tests.e2e.pair import watch_preemptions, watch_prefix_hits
from vllm_specplug.vllm_v2.plain_engine import use_v2

use_v2()


def check_images_of_any_shape() -> None:
    for ahead in (False, True):
        expected, counts = compare(engines(async_scheduling=ahead), prompts())
        assert images_matter(expected)
        assert (counts.stale > 0) == ahead and counts.skipping > 0, counts


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
