# SPDX-License-Identifier: Apache-2.0
"""The state machine on a target with recurrent states, float32."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.hybrids import make_hybrid_target, use_float32_states
from tests.e2e.tiny import make_tokenizer
from tests.fuzz.examples import TIMEOUT_S, assert_eventful, assert_noticed, run_examples
from vllm_specplug.vllm_attention.state_rows import StateStep

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.own_process(timeout_s=TIMEOUT_S),
    pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.full)]),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """States so small that blocks stay at 32 tokens, every one of them kept, and a pool that
    preempts."""
    use_float32_states()
    folder = tmp_path_factory.mktemp("target")
    make_hybrid_target(folder, "Qwen3Next", make_tokenizer(folder), size=16)
    return {"model": str(folder), "num_gpu_blocks_override": 26,
            "prefix_cache_retention_interval": None}  # fmt: skip


def test_recurrent_states(ahead: bool, target: dict[str, Any]) -> None:
    totals = run_examples("oracle", ahead, target)
    print(dict(totals))
    assert_eventful(totals, ahead)


def test_wrong_states_are_noticed(ahead: bool, target: dict[str, Any]) -> None:
    """The negative control: the committed row is its parent."""
    commit = StateStep.commit

    def commits_the_row_above(step: Any, last_rows: Any, *rest: Any) -> None:
        above = step.parents[last_rows]
        commit(step, above.where(above >= 0, last_rows), *rest)

    with patch.object(StateStep, "commit", commits_the_row_above):
        assert_noticed(r"^\('r\d+', \[", ahead, target)
