# SPDX-License-Identifier: Apache-2.0
"""Heads that were trained for tiny targets of each family draft what these accept."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.fork_server import run_forked
from tests.e2e.harness import assert_drafted, run_engine
from tests.e2e.pair import written_checks
from tests.e2e.tiny_engine import tiny_engine
from tests.e2e.trained import PROMPTS, trained

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("trained_head_checks")]

MODULE = "trained_head_checks"


@cache
def failures(*only: str) -> dict[str, str | None]:
    """Of checks run in one process."""
    with TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        arguments = [f"tests.e2e.{MODULE}", str(result), *only]
        run_forked("tests.e2e.pair", arguments, log)
        assert result.is_file(), log.read_text()[-6000:]
        return json.loads(result.read_text())


def test_a_head_for_windows_and_groups() -> None:
    name = "check_gemma_3"
    assert failures(name)[name] is None


@pytest.mark.full
@pytest.mark.parametrize("name", written_checks(MODULE))
def test_each_family(name: str) -> None:
    assert failures()[name] is None


@pytest.mark.full
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
