# SPDX-License-Identifier: Apache-2.0
"""Method longspec keeps the output of a random small target: float32, greedy, tiny windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import EngineResult, assert_drafted, run_engine
from tests.e2e.tiny import make_longspec_head, make_target
from tests.e2e.tiny_engine import tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("longspec")]

VOCAB = 12
PARAMS = {
    "temperature": 0.0,
    "max_tokens": 60,
    "ignore_eos": True,
    "detokenize": False,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.8,
}
# Longer and shorter than the window, some sharing a prefix of several blocks.
SHARED = [(7 * i * i + 3 * i) % 9 + 2 for i in range(70)]
PROMPTS = [[3, 7, 5, 9], SHARED, [*SHARED, 4, 4, 5], [9], [*SHARED[:66], 2, 3], SHARED[::-1], [8]]
CALLS = [{"prompts": PROMPTS, "params": PARAMS}, {"prompts": PROMPTS[1:3], "params": PARAMS}]

MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: engine arguments, speculative options
    "best_first": ({}, {"tree_depth": 4}),
    # Fewer windows than requests that come and go, prefix hits, chunked prompts, preemption.
    "crowded": (
        {
            "enable_prefix_caching": True,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 64,
            "num_gpu_blocks_override": 11,
            "max_model_len": 192,
        },
        {"ngram_topk": 2},
    ),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("longspec")
    return make_target(folder / "target", VOCAB), make_longspec_head(folder / "head", VOCAB)


def _plain(target: Path) -> EngineResult:
    return run_engine(tiny_engine(target), CALLS)


@pytest.mark.parametrize("mode", MODES)
def test_output_equals_plain_decoding(models: tuple[Path, Path], mode: str) -> None:
    target, head = models
    engine, options = MODES[mode]
    speculative = {
        "method": "longspec",
        "model": str(head),
        "num_speculative_tokens": 16,
        "tree_budget": 16,
        "ngram_topk": 0,
        **options,
    }
    tree = run_engine({**tiny_engine(target), **engine}, CALLS, speculative=speculative)
    for call in range(len(CALLS)):
        assert tree.token_ids(call) == _plain(target).token_ids(call)
    assert len({tuple(ids) for ids in tree.token_ids()}) > 1
    assert_drafted(tree, least_acceptance=0.0)
    if mode == "crowded":
        assert tree.preemptions > 0
        assert tree.counters["vllm:prefix_cache_hits"] > 0


def test_contexts_of_thousands_of_tokens(models: tuple[Path, Path], tmp_path: Path) -> None:
    """The published window, and contexts far beyond it, up to the end of a target with YaRN."""
    target, _ = models
    head = make_longspec_head(tmp_path / "head", VOCAB, window=512)
    engine = {
        **tiny_engine(target),
        "hf_overrides": {
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
        },
        "max_model_len": 8192,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
    }
    long = [(11 * i * i + 5 * i) % 10 + 2 for i in range(8170)]
    calls = [{"prompts": [long, long[:4100], [5, 6], long[:8100]], "params": PARAMS}]
    speculative = {
        "method": "longspec",
        "model": str(head),
        "num_speculative_tokens": 12,
        "tree_budget": 12,
        "ngram_topk": 0,
    }
    tree = run_engine(engine, calls, speculative=speculative)
    plain = run_engine(engine, calls)
    assert tree.token_ids() == plain.token_ids()
    # The longest one ends with the context, in the middle of its trees.
    assert [len(ids) for ids in tree.token_ids()] == [8192 - 8170, 60, 60, 60]
    assert tree.counters["vllm:prefix_cache_hits"] > 8000
    assert_drafted(tree, least_acceptance=0.0)
