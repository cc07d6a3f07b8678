# SPDX-License-Identifier: Apache-2.0
"""Multimodal models of Qwen3.5: Gated DeltaNet layers, images, positions on three axes,
against plain decoding, float32."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.e2e import hybrid_pairs, vision
from tests.e2e.hybrid_pairs import WRONG
from tests.e2e.hybrids import wrapped_hybrid
from tests.e2e.mtp_modules import add_module
from tests.e2e.pair import Pair, changed, pair
from tests.e2e.vision import compare, compare_answers, prompts

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.own_process,
    pytest.mark.full,
    pytest.mark.usefixtures("float32_states"),
]


def engines(family: str, *, method: str = "oracle", model: str = "") -> Pair:
    model = model or wrapped_hybrid(family)
    with vision.without_processors():
        return pair(
            method, model=model, limit_mm_per_prompt={"image": 2, "video": 0},
            speculative=hybrid_pairs.SPECULATIVE,
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
