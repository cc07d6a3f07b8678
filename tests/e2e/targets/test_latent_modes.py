# SPDX-License-Identifier: Apache-2.0
"""More of test_latent.py: refusals, two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import EngineResult, assert_drafted, run_engine
from tests.e2e.latent import BACKEND, make_latent_target
from tests.e2e.tiny import make_head
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("latent_modes")]

CALLS = [
    {"prompts": PROMPTS, "params": PARAMS},
    {"prompts": PROMPTS, "params": {**PARAMS, "temperature": 0.8, "seed": 7}},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent-modes")
    make_latent_target(folder / "target", "DeepseekV3", vocab_size=VOCAB)
    make_head(folder / "head", VOCAB)
    return folder


def _tokens(models: Path, drafts: bool, **engine: Any) -> list[list[list[int]]]:
    speculative = {
        "method": "jetspec", "model": str(models / "head"), "num_speculative_tokens": 12,
        "tree_budget": 12, "max_step_rows": 512,
    }  # fmt: skip
    result: EngineResult = run_engine(
        {**tiny_engine(models / "target"), **BACKEND, **engine},
        CALLS,
        speculative=speculative if drafts else None,
        own_processes="tensor_parallel_size" in engine,
    )
    if drafts:
        assert_drafted(result, least_acceptance=0.0)
    return [result.token_ids(call) for call in range(len(CALLS))]


def test_experts_that_are_not_compiled_as_written_are_refused(models: Path) -> None:
    with pytest.raises(AssertionError, match=r"scoring_func='sigmoid' and a bias.*eager"):
        _tokens(models, True, enforce_eager=False)


@pytest.mark.skipif(not BACKEND, reason="without AMX vLLM takes CPU_MLA itself")
def test_vllms_backend_for_amx_is_refused(models: Path) -> None:
    with pytest.raises(AssertionError, match="AMXMLAImpl.*--attention-backend CPU_MLA"):
        _tokens(models, True, attention_backend="AMX_MLA", dtype="bfloat16")


def test_two_ranks(models: Path) -> None:
    """Each has half the heads, over a latent cache that both have whole."""
    two = {"tensor_parallel_size": 2}
    assert _tokens(models, True, **two) == _tokens(models, False, **two)
