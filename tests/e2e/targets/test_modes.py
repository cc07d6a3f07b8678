# SPDX-License-Identifier: Apache-2.0
"""Targets with recurrent states and with latent caches, compiled and on two tensor parallel
ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import assert_drafted, run_engine
from tests.e2e.hybrids import make_hybrid_target
from tests.e2e.latent import BACKEND, make_latent_target
from tests.e2e.tiny import make_head
from tests.e2e.tiny_engine import CALLS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("target_modes")]

TWO_RANKS = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target-modes")
    make_hybrid_target(folder / "hybrid", "Qwen3Next", VOCAB)
    make_latent_target(folder / "latent", "DeepseekV3", vocab_size=VOCAB)
    make_head(folder / "head", VOCAB)
    return folder


Tokens = list[list[list[int]]]


def _tokens(target: Path, drafts: bool, *sabotage: str, **engine: Any) -> Tokens:
    speculative = {
        "method": "jetspec", "model": str(target.with_name("head")), "num_speculative_tokens": 12,
        "tree_budget": 12, "max_step_rows": 512,
    }  # fmt: skip
    result = run_engine(
        {**tiny_engine(target), **(BACKEND if target.name == "latent" else {}), **engine},
        CALLS,
        speculative=speculative if drafts else None,
        sabotage=sabotage,
        own_processes="tensor_parallel_size" in engine,
        float32_states=target.name == "hybrid",
    )
    if drafts:
        assert_drafted(result, least_acceptance=0.0)
    return [result.token_ids(call) for call in range(len(CALLS))]


def test_compiled_states(models: Path) -> None:
    target = models / "hybrid"
    assert _tokens(target, True, enforce_eager=False) == _tokens(target, False)


def test_states_on_two_ranks(models: Path) -> None:
    """Each has half the heads of every state, and commits what the first one's trees accept."""
    target = models / "hybrid"
    plain = _tokens(target, False, **TWO_RANKS)
    assert _tokens(target, True, "drafts", **TWO_RANKS) == plain
    assert _tokens(target, True, "states", **TWO_RANKS) != plain


def test_latent_rows_on_two_ranks(models: Path) -> None:
    """Each has half the heads, over a latent cache that both have whole."""
    target = models / "latent"
    assert _tokens(target, True, **TWO_RANKS) == _tokens(target, False, **TWO_RANKS)


def test_experts_that_are_not_compiled_as_written_are_refused(models: Path) -> None:
    with pytest.raises(AssertionError, match=r"scoring_func='sigmoid' and a bias.*eager"):
        _tokens(models / "latent", True, enforce_eager=False)


@pytest.mark.skipif(not BACKEND, reason="without AMX vLLM takes CPU_MLA itself")
def test_vllms_backend_for_amx_is_refused(models: Path) -> None:
    with pytest.raises(AssertionError, match="AMXMLAImpl.*--attention-backend CPU_MLA"):
        _tokens(models / "latent", True, attention_backend="AMX_MLA", dtype="bfloat16")
