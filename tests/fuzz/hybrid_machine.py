# SPDX-License-Identifier: Apache-2.0
"""The state machine on a target with recurrent states, float32; see test_state_machine.py."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase

from tests.e2e.hybrids import make_hybrid_target, use_float32_states
from tests.e2e.tiny import make_tokenizer
from tests.fuzz.machine_checks import run_examples


@cache
def target() -> dict[str, Any]:
    """States so small that blocks stay at 32 tokens, every one of them kept, and a pool that
    preempts."""
    use_float32_states()
    folder = Path(tempfile.mkdtemp(prefix="specplug-hybrid-")) / "target"
    folder.mkdir()
    make_hybrid_target(folder, "Qwen3Next", make_tokenizer(folder), size=16)
    return {"model": str(folder), "num_gpu_blocks_override": 26,
            "prefix_cache_retention_interval": None}  # fmt: skip


def run_hybrid(ahead: bool) -> None:
    totals = run_examples("oracle", ahead, target())
    print(dict(totals))
    assert totals["verified"] > 0 and totals["accepted"] > 0, totals
    assert totals["preempted"] > 0 and totals["cached"] > 0, totals
    assert (totals["stale"] > 0) == bool(ahead), totals


def wrong_states_are_noticed(ahead: bool) -> None:
    """The negative control: the committed row is its parent."""
    from vllm_specplug.vllm_attention.state_rows import StateStep

    commit = StateStep.commit

    def commits_the_row_above(step: Any, last_rows: Any, *rest: Any) -> None:
        above = step.parents[last_rows]
        commit(step, above.where(above >= 0, last_rows), *rest)

    StateStep.commit = commits_the_row_above  # type: ignore[method-assign]
    try:
        with pytest.raises(AssertionError, match=r"^\('r\d+', \["):
            run_examples(
                "oracle", ahead, target(), phases=[Phase.generate], report_multiple_bugs=False
            )
    finally:
        StateStep.commit = commit  # type: ignore[method-assign]
