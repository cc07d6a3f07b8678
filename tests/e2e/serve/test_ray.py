# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel ranks under Ray: the first rank's trees, plain decoding's output."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import assert_drafted, with_own_budgets
from tests.e2e.ray_ranks import run_ray
from tests.e2e.tiny import make_head, make_target
from tests.e2e.tiny_engine import CALLS, VOCAB, tiny_engine

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray"
    ),
]

# What vLLM's first executor copies to workers beside its own variables.
PREFIX = {"VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": "SPECPLUG_"}
EXECUTORS: dict[str, dict[str, Any]] = {
    "two_nodes": {},
    "first_executor": {"legacy": True, "env": PREFIX},
}


@pytest.mark.parametrize(
    "executor", ["two_nodes", pytest.param("first_executor", marks=pytest.mark.full)]
)
def test_ranks_under_ray_keep_the_output(tmp_path: Path, executor: str) -> None:
    """The second rank drafts other trees by another clock. Workers get our variables."""
    options = EXECUTORS[executor]
    if options.get("legacy") and not importlib.util.find_spec("vllm.v1.executor.ray_executor"):
        pytest.skip("this vLLM has one Ray executor")
    engine = tiny_engine(make_target(tmp_path / "target", VOCAB))
    head = make_head(tmp_path / "head", VOCAB)
    spec = {
        "method": "jetspec", "model": str(head), "num_speculative_tokens": 12,
        "max_step_rows": 512, "ngram_topk": 3,
    }  # fmt: skip
    plain, _ = run_ray(engine, CALLS, tmp_path, **options)
    calls = [with_own_budgets(call) for call in CALLS]
    engine["speculative_config"] = spec
    trees, carried = run_ray(engine, calls, tmp_path, "clock", "drafts", **options)
    for call in range(len(CALLS)):
        assert trees.token_ids(call) == plain.token_ids(call)
    assert_drafted(trees, least_acceptance=0.0)
    assert carried == [True, True]
