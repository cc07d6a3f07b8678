# SPDX-License-Identifier: Apache-2.0
"""Acceptance of the shipped head on rows of benchmarks, in a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import METHODS, target_path

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full, pytest.mark.xdist_group("bench")]

ROWS = {
    "math": [{"question": "What is 2 + 2?", "answer": "4"}, {"wrong": 1}],
    "mt_bench": [{"question_id": 1, "turns": ["List three fruits.", "Say that again."]}],
}


def test_larger_trees_accept_more_and_both_turns_are_answered(tmp_path: Path) -> None:
    data = []
    for name, rows in ROWS.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data += ["--data", str(path)]
    out = tmp_path / "results.json"
    head = ["--model", target_path(), "--head", str(METHODS["jetspec"]["model"])]
    limits = ["--sizes", "1,16", "--output-len", "24", "--max-model-len", "512", "--eager"]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_specplug.cli", "evaluate", *data, *head, *limits,
         "--dtype", "float32", "--out", str(out)],
        capture_output=True, text=True, timeout=850,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    record = json.loads(out.read_text())
    cells = {(cell["data"], cell["tree_size"]): cell for cell in record["results"]}
    assert {key: cell["answers"] for key, cell in cells.items()} == {
        ("math", 1): 1, ("math", 16): 1, ("mt_bench", 1): 2, ("mt_bench", 16): 2
    }  # fmt: skip
    for name in ROWS:
        small, large = cells[name, 1], cells[name, 16]
        assert 0 < large["drafts"] < small["drafts"]
        assert 1 < small["mean_acceptance_length"] <= 2 < large["mean_acceptance_length"]
        assert len(small["accepted_to_depth"]) == 1 < len(large["accepted_to_depth"])
    (places,) = record["left_out"].values()
    assert places == [f"{tmp_path / 'math.jsonl'}:2"]
