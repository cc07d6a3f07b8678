# SPDX-License-Identifier: Apache-2.0
"""Method longspec keeps the output of a random small target over contexts of any length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import assert_drafted, run_engine
from tests.e2e.tiny import make_longspec_head, make_target
from tests.e2e.tiny_engine import PARAMS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("longspec")]


def test_contexts_of_thousands_of_tokens(tmp_path: Path) -> None:
    """The published window, and contexts far beyond it, up to the end of a target with YaRN."""
    target = make_target(tmp_path / "target", VOCAB)
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
    calls = [
        {
            "prompts": [long, long[:4100], [5, 6], long[:8100]],
            "params": {**PARAMS, "max_tokens": 60},
        }
    ]
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
