# SPDX-License-Identifier: Apache-2.0
"""Text models of Qwen3.5 on trees against plain decoding, float32; see test_hybrids.py.

Their positions have one axis: vLLM takes M-RoPE out of their config. Their module imports that of
Qwen3-VL, which wants torchvision.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.e2e import hybrid_checks, vision_checks
from tests.e2e.hybrid_checks import WRONG, changed, compared
from tests.e2e.hybrids import ROPE_ON_AXES, make_hybrid_target
from tests.e2e.pair import Pair

vision_checks.have_torchvision()


@cache
def engines(family: str) -> Pair:
    folder = Path(tempfile.mkdtemp(prefix="specplug-qwen3-5-")) / "target"
    make_hybrid_target(folder, family, hybrid_checks.VOCAB, rope_parameters=ROPE_ON_AXES)
    return hybrid_checks.engines(model=str(folder))


def check_text_model() -> None:
    made = engines("Qwen3_5Text")
    assert not made.tree.llm_engine.vllm_config.model_config.uses_mrope
    compared(made, least_accepted=60)
    for name, change in WRONG:
        with changed(name, change), pytest.raises(AssertionError, match="differs"):
            compared(made)


def check_text_model_with_experts() -> None:
    compared(engines("Qwen3_5MoeText"), least_accepted=60)
