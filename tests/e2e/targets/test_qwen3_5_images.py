# SPDX-License-Identifier: Apache-2.0
"""Multimodal models of Qwen3.5: Gated DeltaNet layers, images, positions on three axes,
against plain decoding, float32."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e import hybrid_pairs, vision
from tests.e2e.hybrid_pairs import WRONG
from tests.e2e.hybrids import wrapped_hybrid
from tests.e2e.mtp_modules import add_module
from tests.e2e.pair import Pair, changed, core_of, pair, watch_preemptions, watch_prefix_hits
from tests.e2e.vision import compare, compare_answers, prompts

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.own_process,
    pytest.mark.full,
    pytest.mark.usefixtures("float32_states"),
]


def engines(
    family: str, *, method: str = "oracle", size: int = 32, model: str = "", **options: Any
) -> Pair:
    model = model or wrapped_hybrid(family, size)
    with vision.without_processors():
        return pair(
            method, model=model, limit_mm_per_prompt={"image": 2, "video": 0},
            speculative=hybrid_pairs.SPECULATIVE, **options,
        )  # fmt: skip


def test_text_and_images() -> None:
    made = engines("Qwen3_5")
    expected, _ = compare(made, prompts())
    # The same text around another image.
    assert expected[4].outputs[0].token_ids != expected[7].outputs[0].token_ids
    for wrong in WRONG:
        with changed(*wrong), pytest.raises(AssertionError, match="differs"):
            compare(made, prompts())
    # A tree's rows keep, on every axis, the positions that vLLM gives a chain.
    linear = patch("vllm_specplug.vllm_v2.model_state.set_axes", lambda trees, positions: None)
    with linear, pytest.raises(AssertionError, match="differs"):
        compare(made, prompts())
    # Nothing of it is left behind.
    compare(made, prompts())


def test_its_own_module(tmp_path: Path) -> None:
    """Drafts of the multi-token-prediction module, whose positions are on one axis."""
    folder = tmp_path / "target"
    shutil.copytree(wrapped_hybrid("Qwen3_5"), folder)
    made = engines("Qwen3_5", method="mtp_tree", model=str(add_module(folder)))
    _, counts = compare_answers(made, prompts(), max_tokens=40, detokenize=False)
    assert counts.branching > 20 and counts.accepted > 0, counts
    for wrong in WRONG[:1]:
        with changed(*wrong), pytest.raises(AssertionError, match="differs"):
            compare_answers(made, prompts(), max_tokens=40, detokenize=False)


def test_text_and_images_with_experts() -> None:
    compare(engines("Qwen3_5Moe"), prompts())


def schedulers(**tree: Any) -> Iterator[tuple[Pair, bool]]:
    """Engines with blocks of 32 tokens, which end inside an image, whose prompts come in chunks,
    with a scheduler that waits for every step and one that works ahead; and whether it does."""
    for ahead in (False, True):
        common = {"enable_prefix_caching": True, "max_num_batched_tokens": 96}
        made = engines("Qwen3_5", size=16, tree={**common, "async_scheduling": ahead, **tree})
        assert core_of(made.tree).scheduler.block_size == 32
        yield made, ahead


def test_prefix_hits_and_chunks_with_images() -> None:
    for made, ahead in schedulers():
        hits = watch_prefix_hits(made.tree)
        for hit in (0, 32):
            hits.clear()
            _, counts = compare(made, prompts())
            assert max(hits.values()) == hit, hits
            assert (counts.stale > 0) == ahead, counts


def test_preemption_with_images() -> None:
    for made, ahead in schedulers(num_gpu_blocks_override=40):
        preempted = watch_preemptions(made.tree)
        _, counts = compare(made, prompts())
        assert preempted and (counts.stale > 0) == ahead, (preempted, counts)
