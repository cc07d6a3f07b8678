# SPDX-License-Identifier: Apache-2.0
"""The page of runs on a GPU: what differed or failed is on it, and the last result counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scripts import load_script

page = load_script("gpu/result_page")
RECORD = {"command": "check.py", "commit": "0123456789ab", "date": "", "versions": {},
          "hardware": {"gpu": "NVIDIA X"}}  # fmt: skip


def write(folder: Path, name: str, data: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data))


def call(equal: int) -> dict[str, Any]:
    return {"case": "jetspec", "call": "greedy", "dtype": "float32", "equal": equal, "tokens": 8,
            "drafts": 4, "accepted": 6}  # fmt: skip


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    record = {**RECORD, "kernel": "cute", "passed": False, "cases": 7}
    write(first, "cute_correctness", record)
    parts = {"cute: graph replay": {"status": "ok"},
             "cute: races": {"status": "failed", "error": "turn 3\ndiffers"}}  # fmt: skip
    write(first, "gpu_check", {**RECORD, "name": "gpu_check", "parts": parts, "rows": []})
    for folder, equal in ((first, 5), (second, 8)):
        write(folder, "gpu_lossless", {**RECORD, "name": "gpu_lossless", "rows": [call(equal)]})
    write(first, "cuda_v2_checks", {"check_a": "Traceback\nValueError: odd", "check_b": None})
    write(second, "cuda_v2_checks", {"check_b": "ValueError: even"})
    cell = {"context": 1024, "batch": 1, "nodes": 64}
    times = [{**cell, "kernel": "cute tree", "us": 21.4, "of_copy": 0.1}, {"kernel": "x"}]
    kernels = {**RECORD, "name": "gpu_kernels_page16", "rows": times, "copy_bandwidth": 2e12,
               "product_rate": 7e14}  # fmt: skip
    write(second, "gpu_kernels_page16", kernels)
    steps = [{"part": "ar", "batch": 1, "context": 1024, "step_ms": 7.0}]
    write(second, "gpu_verify", {**RECORD, "name": "gpu_verify", "rows": steps})
    out = tmp_path / "gpu_x"
    monkeypatch.setattr(sys, "argv", ["", "--out", str(out), str(first), str(second)])
    assert page.main() == 0
    text = out.with_suffix(".md").read_text()
    assert text.startswith("# On an NVIDIA X\n") and "To be measured again" not in text
    assert "| cute | 7 | graph replay, races | cute: races: turn 3 differs |" in text
    assert "| jetspec | float32 | 8 of 8 | 2.50 |" in text
    failed = "`check_a`: ValueError: odd; `check_b`: ValueError: even"
    assert f"| `cuda_v2_checks` | 0 of 2 | {failed} |" in text
    assert "| 1 | 1024 | 64 | - | - | 21 | - | - | - | - |" in text
    assert "| ar | 1 | 1024 | - | 7.00 | - | - | - | - |" in text
    # Of the float32 outputs, one call: identical.
    assert "| at least 1 | 1 of 1 | 1.00 " in text
    assert json.loads(out.with_suffix(".json").read_text())["checks"]["cute"]["failed"]
