# SPDX-License-Identifier: Apache-2.0
"""Multimodal models of Qwen3.5: Gated DeltaNet layers, images, positions on three axes. On V1
against plain decoding, float32; see test_hybrids_in_full.py."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import hybrid_checks, vision_checks
from tests.e2e.hybrid_checks import WRONG, changed
from tests.e2e.hybrids import ROPE_ON_AXES, make_hybrid_target
from tests.e2e.pair import Pair, pair
from tests.e2e.tiny import make_tokenizer
from tests.e2e.vision_checks import END, IMAGE, START, VIDEO, VOCAB, compare, prompts


@cache
def wrapped(family: str) -> str:
    """A text model and a vision tower."""
    folder = Path(tempfile.mkdtemp(prefix="specplug-qwen3-5-")) / "target"
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
             "out_hidden_size": 64, "patch_size": vision_checks.PATCH,
             "num_position_embeddings": 64}  # fmt: skip
    wrapper = {"vision_config": tower, "image_token_id": IMAGE, "video_token_id": VIDEO,
               "vision_start_token_id": START, "vision_end_token_id": END,
               "tie_word_embeddings": False}  # fmt: skip
    make_hybrid_target(folder, family, VOCAB, wrapper=wrapper, rope_parameters=ROPE_ON_AXES)
    assert make_tokenizer(folder) <= VOCAB
    return str(folder)


def engines(family: str, **options: Any) -> Pair:
    model = wrapped(family)
    with vision_checks.without_processors():
        return pair(
            model=model, limit_mm_per_prompt={"image": 2, "video": 0},
            speculative=hybrid_checks.SPECULATIVE, **options,
        )  # fmt: skip


def check_text_and_images() -> None:
    made = engines("Qwen3_5")
    expected, _ = compare(made, prompts())
    # The same text around another image.
    assert expected[4].outputs[0].token_ids != expected[7].outputs[0].token_ids
    assert made.runner.state.positions.shape[0] == 3
    for name, change in WRONG:
        with changed(name, change), pytest.raises(AssertionError, match="differs"):
            compare(made, prompts())
    backend = made.runner.tree_backend
    backend.set_positions = lambda positions, step: None
    try:
        with pytest.raises(AssertionError, match="differs"):
            compare(made, prompts())
    finally:
        del backend.set_positions


def check_text_and_images_with_experts() -> None:
    compare(engines("Qwen3_5Moe"), prompts())
