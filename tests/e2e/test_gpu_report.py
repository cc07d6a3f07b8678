# SPDX-License-Identifier: Apache-2.0
"""The whole of `make gpu-report` as a dry run on the CPU: interpreted kernels, tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[2]


def make_report(out: Path) -> str:
    """Runs it; what it printed."""
    command = ["make", "gpu-report", f"GPU_PYTHON={sys.executable}", f"GPU_OUT={out}",
               "ARGS=--device cpu"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    report = out / "gpu_report.json"
    text = report.read_text()[-6000:] if report.is_file() else ""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:] + text
    return done.stdout


@pytest.mark.timeout(3600)
def test_every_step_ends_well_and_a_second_run_keeps_them(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("vllm")
    make_report(tmp_path)
    report = json.loads((tmp_path / "gpu_report.json").read_text())
    steps = report["steps"]
    assert len(steps) == 5 and {step["status"] for step in steps.values()} == {"ok"}
    parts = {
        f"{step}, {name}": part["status"]
        for step, record in steps.items()
        for name, part in record["result"].get("parts", {}).items()
    }
    # This machine's vLLM has no FlashAttention for the first, and no interpreter runs the others.
    left_out = {f"kernels: right?, {name}: self-test" for name in ("flash", "cute", "cute_ws")}
    assert {name for name, status in parts.items() if status != "ok"} == left_out
    assert {parts[name] for name in left_out} == {"skipped"}
    rows = {name: record["result"].get("rows", []) for name, record in steps.items()}
    assert not [row for found in rows.values() for row in found if "failed" in row]
    engines = rows["engines: ar,verify,stock"]
    assert {row["part"] for row in engines} == {"ar", "verify", "stock"}
    assert all(row["step_ms"] > 0 for row in engines)
    outcomes = {line["what"]: line for line in report["predictions"]}
    # The one that a CPU can keep. Both budgets, two prompts together and each alone.
    lossless = outcomes["outputs of plain decoding in float32 (1: identical)"]
    assert lossless["holds"] is True and lossless["count"] == 6
    page = (tmp_path / "gpu_report.html").read_text()
    assert "a CPU (dry run)" in page and page.count("<details>") >= 1
    again = make_report(tmp_path)
    assert again.count("kept from an earlier run") == 5
