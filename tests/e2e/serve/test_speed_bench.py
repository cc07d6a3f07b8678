# SPDX-License-Identifier: Apache-2.0
"""The GPU speed bench as a dry run: tiny engines, the target's chain, the imposed acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.fork_server import run_code

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full]

BENCH = Path(__file__).resolve().parents[3] / "bench" / "gpu"
# Runs a script whose engines are forks of its process, which has imported vLLM.
SCRIPT = """
import multiprocessing, runpy, sys

fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method: fork
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("head", "imposed"), [("jetspec", 6.0), ("eagle3", 3.40)])
def test_the_bench_measures_the_imposed_acceptance_and_makes_its_page(
    tmp_path: Path, head: str, imposed: float
) -> None:
    out = tmp_path / "run"
    arguments = [
        "--device", "cpu", "--out", str(out), "--head", head, "--phases",
        "plain;15 nodes",
        "--batches", "1", "4", "--profiles", "GSM8K", "--rounds", "1", "--context", "24",
        "--tokens", "400", "--profile-batches",
    ]  # fmt: skip
    run_code(SCRIPT, str(BENCH / "speed.py"), *arguments)
    run_code(SCRIPT, str(BENCH / "speed_page.py"), str(out), "--out", str(tmp_path))
    rows = json.loads((out / "gpu_speed.json").read_text())["rows"]
    assert [(row["arm"], row["batch"]) for row in rows] == [
        ("plain", 1), ("15 nodes", 1), ("plain", 4), ("15 nodes", 4),
    ]  # fmt: skip
    assert all(row["is_chain"] for row in rows)
    for row in rows[1::2]:
        assert row["imposed"] == pytest.approx(imposed, abs=0.01)
        assert row["drafts"] > 0 and row["mean_acceptance"] == pytest.approx(imposed, abs=0.2)
    page = (tmp_path / "gpu_speed.md").read_text()
    # No engine was compiled: of such a run the steps are published, no speed-up.
    assert "| batch | 15 nodes |" in page and "Speed-up" not in page
