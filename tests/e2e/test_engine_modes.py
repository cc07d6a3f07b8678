# SPDX-License-Identifier: Apache-2.0
"""Every engine mode and option keeps the output: a random small target, float32, greedy."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import EngineResult, assert_drafted, run_engine
from tests.e2e.tiny import make_head, make_target

pytestmark = pytest.mark.e2e

VOCAB = 12
PROMPTS = [[3, 7, 5, 9], [4, 5, 6], [2, 2, 2, 3, 4, 5], [9], [8, 1, 7, 7, 10, 11, 3]]
# Small numbers of tokens repeat soon; penalties keep the outputs from becoming one token.
PARAMS = {
    "temperature": 0.0,
    "max_tokens": 48,
    "ignore_eos": True,
    "detokenize": False,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.8,
}

MODES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    # name: engine arguments, speculative options, environment
    "compiled": ({"enforce_eager": False}, {}, {}),
    "tensor_parallel": (
        {"tensor_parallel_size": 2},
        {},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    "reference_kernel": ({}, {"tree_kernel": "reference"}, {}),
    "compiled_kernel": ({}, {"tree_kernel": "cpp"}, {}),
    "accum_logp": ({}, {"tree_builder": "accum_logp"}, {}),
    "entropy": ({}, {"tree_builder": "entropy"}, {}),
    "hybrid": ({}, {"tree_builder": "hybrid", "hybrid_lambda": 0.5}, {}),
    "chain": ({}, {"tree_width": 1}, {}),
    "bidirectional": ({}, {"causal": False}, {}),
    "one_node": ({}, {"num_speculative_tokens": 1}, {}),
    "largest_tree": ({}, {"num_speculative_tokens": 256, "tree_width": 12}, {}),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("modes")
    return make_target(folder / "target", VOCAB), make_head(folder / "head", VOCAB)


def _engine(target: Path) -> dict[str, Any]:
    return {
        "model": str(target),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "block_size": 32,
        "enable_prefix_caching": False,
    }


_CALLS = [{"prompts": PROMPTS, "params": PARAMS}]


@cache
def _plain(target: Path) -> EngineResult:
    return run_engine(_engine(target), _CALLS)


@pytest.mark.xdist_group("engine_modes")
@pytest.mark.parametrize("mode", MODES)
def test_output_equals_plain_eager_decoding(models: tuple[Path, Path], mode: str) -> None:
    target, head = models
    engine, options, env = MODES[mode]
    speculative = {
        "method": "jetspec",
        "model": str(head),
        "num_speculative_tokens": 24,
        "max_step_rows": 4096,
        **options,
    }
    tree = run_engine({**_engine(target), **engine}, _CALLS, speculative=speculative, env=env)
    assert tree.token_ids() == _plain(target).token_ids()
    assert len({tuple(ids) for ids in tree.token_ids()}) > 1
    assert_drafted(tree, least_acceptance=0.0)
