# SPDX-License-Identifier: Apache-2.0
"""Text models of Qwen3.5 on trees against plain decoding, float32.

Their positions have one axis: vLLM takes M-RoPE out of their config. Their module imports that of
Qwen3-VL, which wants torchvision.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import hybrid_pairs, vision
from tests.e2e.hybrid_pairs import WRONG, compared
from tests.e2e.hybrids import ROPE_ON_AXES, make_hybrid_target
from tests.e2e.mtp_modules import PROMPTS, VOCAB, add_module
from tests.e2e.pair import Pair, changed
from tests.e2e.requests import greedy, seeded

pytestmark = [pytest.mark.e2e, pytest.mark.own_process, pytest.mark.usefixtures("float32_states")]


@pytest.fixture(scope="module", autouse=True)
def _torchvision() -> None:
    vision.have_torchvision()


def engines(folder: Path, family: str) -> Pair:
    make_hybrid_target(folder, family, hybrid_pairs.VOCAB, rope_parameters=ROPE_ON_AXES)
    return hybrid_pairs.engines(model=str(folder))


def test_text_model(tmp_path: Path) -> None:
    made = engines(tmp_path, "Qwen3_5Text")
    assert not made.tree.llm_engine.vllm_config.model_config.uses_mrope
    compared(made, least_accepted=60)
    for wrong in WRONG:
        with changed(*wrong), pytest.raises(AssertionError, match="differs"):
            compared(made)


def test_text_model_with_experts(tmp_path: Path) -> None:
    compared(engines(tmp_path, "Qwen3_5MoeText"), least_accepted=60)


@pytest.mark.parametrize(
    "family", ["Qwen3_5Text", pytest.param("Qwen3_5MoeText", marks=pytest.mark.full), "Qwen3Next"]
)
def test_its_own_module(family: str, tmp_path: Path) -> None:
    """The multi-token-prediction module in the target's checkpoint, found without a "model"."""
    rope = {**ROPE_ON_AXES, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    if family == "Qwen3Next":
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    make_hybrid_target(tmp_path, family, VOCAB, rope_parameters=rope)
    made = hybrid_pairs.engines("mtp_tree", model=str(add_module(tmp_path)))
    params = [greedy(max_tokens=40, detokenize=False), seeded(3, max_tokens=40, detokenize=False)]
    prompts = [prompt for prompt in PROMPTS for _ in params]

    def compare(**options: int) -> None:
        made.compare(prompts, [p.clone() for _ in PROMPTS for p in params], **options)

    compare(least_accepted=8)
    for wrong in WRONG:
        with changed(*wrong), pytest.raises(AssertionError, match="differs"):
            compare()
