# SPDX-License-Identifier: Apache-2.0
"""DSpark heads that read the block's states and Domino heads keep the output, and the engine drafts
with their corrections."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.branch_heads import KINDS, branch_head
from tests.e2e.harness import (
    METHODS,
    EngineResult,
    assert_drafted,
    engine_args,
    first_difference,
    prompts,
    run_engine,
)

pytestmark = pytest.mark.e2e


def run(speculative: dict[str, Any] | None, **engine: Any) -> EngineResult:
    """Six prompts at once, greedy and then seeded."""
    ids = [list(p) for p in prompts(6, max_tokens=96)]
    calls = [
        {"prompts": ids, "params": {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}},
        {"prompts": ids, "params": {"temperature": 0.8, "seed": 5, "max_tokens": 24}},
    ]
    arguments = engine_args(max_model_len=256, max_num_batched_tokens=1024, **engine)
    return run_engine(arguments, calls, speculative=speculative)


def accepted_per_draft(result: EngineResult) -> float:
    """Of the greedy call; lookups draft nothing here."""
    counts = (
        result.call_counter(0, f"vllm:spec_decode_num_{name}")
        for name in ("accepted_tokens", "drafts")
    )
    accepted, drafts = counts
    return accepted / drafts


@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "rnn" else pytest.mark.full) for kind in KINDS]
)
def test_output_equals_plain_decoding(kind: str, ahead: bool) -> None:
    plain = run(None)
    trees = {}
    for corrects in (True, False):
        options = {**METHODS["dspark_tree"], "model": str(branch_head(kind, corrects=corrects))}
        trees[corrects] = run(options, async_scheduling=ahead)
    for call in range(2):
        difference = first_difference(plain.token_ids(call), trees[True].token_ids(call))
        assert difference is None, f"call {call}: {difference}"
    assert_drafted(trees[True])
    # Branches are deep, but not without the correction.
    assert accepted_per_draft(trees[True]) > 1
    assert accepted_per_draft(trees[False]) < 0.7 * accepted_per_draft(trees[True])
