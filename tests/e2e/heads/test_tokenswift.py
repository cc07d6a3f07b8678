# SPDX-License-Identifier: Apache-2.0
"""Method tokenswift on a random small target, float32: lossless from every source of drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import EngineResult, assert_drafted, run_engine
from tests.e2e.tiny import make_target, make_tokenswift_heads
from tests.e2e.tiny_engine import tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("tokenswift")]

VOCAB = 12
PROMPTS = [
    [3, 7, 5, 9],
    [4, 5, 6] * 14,  # beyond the budget of the partial cache from the start
    [2, 2, 2, 3, 4, 5],
    [9],
    [8, 1, 7, 7, 10, 11, 3] * 5,
]
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.8}
PARAMS = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True, "detokenize": False}
CONTEXTUAL = {"extra_args": {"specplug_penalty": 1.4, "specplug_penalty_window": 20}}
# One call each: with vLLM's penalties, with the contextual one, sampled.
CALLS = [
    {"prompts": PROMPTS, "params": {**PARAMS, **PENALTIES}},
    {"prompts": PROMPTS, "params": {**PARAMS, **CONTEXTUAL}},
    {
        "prompts": PROMPTS,
        "params": [
            {**PARAMS, **(CONTEXTUAL if i % 2 else {}), "temperature": 0.9, "seed": i}
            for i in range(len(PROMPTS))
        ],
    },
]

SMALL = {"kv_budget": 40, "num_speculative_tokens": 12}
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: engine arguments, speculative options
    "self": ({}, {"draft_source": "self", "ngram_topk": 0}),
    "small_pool": ({}, {"draft_source": "self", "self_draft_requests": 2}),
    "heads": ({}, {"draft_source": "heads", "ngram_topk": 0}),
    "ngrams": ({}, {"draft_source": "ngrams"}),
    "auto": ({}, {"draft_source": "auto"}),
    "compiled": ({"enforce_eager": False}, {"draft_source": "self"}),
    "preempted": (
        {"num_gpu_blocks_override": 12, "max_num_seqs": 5},
        {"draft_source": "self"},
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tokenswift")
    return make_target(folder / "target", VOCAB), make_tokenswift_heads(folder / "head", VOCAB)


def _engine(target: Path) -> dict[str, Any]:
    return {**tiny_engine(target), "max_model_len": 160, "enable_prefix_caching": True}


def _plain(target: Path) -> EngineResult:
    return run_engine(_engine(target), CALLS)


@pytest.mark.parametrize(
    "mode",
    [pytest.param(name, marks=pytest.mark.full if name == "compiled" else ()) for name in MODES],
)
def test_output_equals_plain_decoding(models: tuple[Path, Path], mode: str) -> None:
    target, head = models
    engine, options = MODES[mode]
    speculative = {
        "method": "tokenswift", "model": str(head), "tree_budget": 12, **SMALL, **options
    }  # fmt: skip
    tree = run_engine({**_engine(target), **engine}, CALLS, speculative=speculative)
    plain = _plain(target)
    for call in range(len(CALLS)):
        assert tree.token_ids(call) == plain.token_ids(call), CALLS[call]["params"]
    assert len({tuple(ids) for ids in tree.token_ids()}) > 1
    assert tree.token_ids(1) != tree.token_ids(0)
    assert_drafted(tree, least_acceptance=0.0)
    if mode == "preempted":
        assert tree.preemptions > 0
