# SPDX-License-Identifier: Apache-2.0
"""A head that was trained for a tiny target, on two ranks."""

from __future__ import annotations

import pytest

from tests.e2e.harness import assert_drafted, run_engine
from tests.e2e.tiny_engine import tiny_engine
from tests.e2e.trained import PROMPTS, trained

pytestmark = [pytest.mark.e2e, pytest.mark.full]


def test_layers_of_two_ranks() -> None:
    """Of a class that returns none; compiled, as users start it."""
    made = trained("Gemma3", "eagle3")
    engine = {
        **tiny_engine(made.target), "tensor_parallel_size": 2, "enforce_eager": False,
        "num_gpu_blocks_override": 128,
    }  # fmt: skip
    params = {"max_tokens": 40, "ignore_eos": True, "detokenize": False}
    calls = [
        {"prompts": PROMPTS, "params": {**params, "temperature": 0.0}},
        {"prompts": PROMPTS, "params": {**params, "temperature": 0.8, "seed": 7}},
    ]
    plain = run_engine(engine, calls, own_processes=True)
    speculative = {
        "method": "eagle3_tree", "model": str(made.head), "num_speculative_tokens": 16,
        "tree_budget": 16, "ngram_topk": 0, "max_step_rows": 512,
    }  # fmt: skip
    tree = run_engine(engine, calls, speculative=speculative, own_processes=True)
    for call in range(len(calls)):
        assert tree.token_ids(call) == plain.token_ids(call)
    # A tree of sixteen nodes has at most a quarter of them accepted.
    assert_drafted(tree, least_acceptance=0.1)
