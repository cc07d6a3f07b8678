# SPDX-License-Identifier: Apache-2.0
"""A small sweep as a user runs it: two real servers, `vllm bench serve`, the page."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import METHODS, target_path

# One worker: servers of two workers would ask for the same ports and logs.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full, pytest.mark.xdist_group("bench")]

PROMPTS = (
    "Write a Python function that reverses a string.",
    "What is the capital of France?",
    "List three fruits.",
    "Repeat these words: one two three four five six seven.",
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(rows))
    plan = {
        "model": target_path(),
        "head": str(METHODS["jetspec"]["model"]),
        "servers": ["plain", "jetspec-8"],
        "data": "prompts.jsonl",
        "dtype": "float32",
        "enforce_eager": True,  # starts in half the time
        "max_model_len": 1024,
        "output_len": 16,
        "points": 2,
        "point_time": 2.0,
        "min_requests": 4,
        "max_requests": 6,
        "goodput": ["e2el:60000"],
    }
    (folder / "plan.yaml").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "vllm_specplug.cli", "bench"]
    command += ["--config", str(folder / "plan.yaml"), "--out", str(folder / "out")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=850)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return folder / "out"


@pytest.fixture(scope="module")
def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def test_every_load_was_measured_on_both_servers(results: dict[str, Any], out: Path) -> None:
    points = results["points"]
    assert len(points) == 2 * 4
    by_server = [[p["level"] for p in points if p["server"] == s] for s in ("plain", "jetspec-8")]
    assert by_server[0] == by_server[1] and len(set(by_server[0])) == 4
    for point in points:
        for key in ("output_throughput", "p50_ttft_ms", "p50_tpot_ms", "p50_e2el_ms"):
            assert point[key] > 0, (point["server"], point["level"], key)
        assert point["request_goodput"] == pytest.approx(point["request_throughput"])
        assert point["speed_up"]["p50_e2el_ms"] > 0
    with (out / "results.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == len(points)


def test_drafts_were_made_accepted_and_timed(results: dict[str, Any]) -> None:
    for point in results["points"]:
        spec = point["spec"]
        if point["server"] == "plain":
            assert spec is None
            continue
        assert spec["drafts"] > 0 and spec["mean_acceptance_length"] > 1.0
        depths = spec["acceptance_by_depth"]
        assert depths == sorted(depths, reverse=True) and 0 < depths[0] <= 1
        assert 0 < spec["nodes_per_request_step"] <= spec["nodes_per_draft"] <= 8
        assert 0 < spec["share"]["draft"] < 1 and 0 < spec["share"]["verify"] < 1


def test_what_made_the_numbers_is_written_down(results: dict[str, Any], out: Path) -> None:
    record = results["provenance"]
    assert record["versions"]["vllm"] and record["hardware"]["logical_cpus"] >= 1
    assert "vllm serve" in results["servers"][1]["command"]
    assert '"method": "jetspec"' in results["servers"][1]["command"]
    assert "vllm bench serve" in results["servers"][1]["load_command"]
    assert (out / "results.svg").stat().st_size > 10_000
