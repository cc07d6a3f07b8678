# SPDX-License-Identifier: Apache-2.0
"""Targets of attention and Gated DeltaNet layers, compiled and on two tensor parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import EngineResult, assert_drafted, run_engine
from tests.e2e.hybrids import make_hybrid_target
from tests.e2e.tiny import make_head
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("hybrid_modes")]

CALLS = [
    {"prompts": PROMPTS, "params": PARAMS},
    {"prompts": PROMPTS, "params": {**PARAMS, "temperature": 0.8, "seed": 7}},
]
COMPILED = {"enforce_eager": False}
TWO_RANKS = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid-modes")
    make_hybrid_target(folder / "target", "Qwen3Next", VOCAB)
    make_head(folder / "head", VOCAB)
    return folder


def _run(models: Path, drafts: bool, *sabotage: str, **engine: Any) -> EngineResult:
    speculative = {
        "method": "jetspec", "model": str(models / "head"), "num_speculative_tokens": 12,
        "tree_budget": 12, "max_step_rows": 512,
    }  # fmt: skip
    return run_engine(
        {**tiny_engine(models / "target"), **engine},
        CALLS,
        speculative=speculative if drafts else None,
        sabotage=sabotage,
        own_processes="tensor_parallel_size" in engine,
        float32_states=True,
    )


def _tokens(result: EngineResult) -> list[list[list[int]]]:
    return [result.token_ids(call) for call in range(len(CALLS))]


def test_compiled(models: Path) -> None:
    tree = _run(models, True, **COMPILED)
    assert _tokens(tree) == _tokens(_run(models, False))
    assert_drafted(tree, least_acceptance=0.0)


def test_two_ranks(models: Path) -> None:
    """Each has half the heads of every state, and commits what the first one's trees accept."""
    plain = _tokens(_run(models, False, **TWO_RANKS))
    tree = _run(models, True, "drafts", **TWO_RANKS)
    assert _tokens(tree) == plain
    assert_drafted(tree, least_acceptance=0.0)
    wrong = _run(models, True, "states", **TWO_RANKS)
    assert _tokens(wrong) != plain
