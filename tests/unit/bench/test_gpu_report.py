# SPDX-License-Identifier: Apache-2.0
"""The report of a machine with a GPU: steps are run, kept and continued; predictions are judged."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scripts import load_script

full_report = load_script("gpu/full_report")
Step = full_report.Step
KEY = {
    "commit": "abc", "model": None, "head": None, "device": "cuda",
    "versions": {"torch": "2.13"}, "hardware": {"gpu": "<GPU & co>"},
}  # fmt: skip


def script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def write_result(out: Path, name: str, rows: list[dict[str, Any]], more: str = "") -> list[str]:
    data = {"name": name, "rows": rows, "parts": {"a": {"status": "ok"}}}
    path = out / f"{name}.json"
    return script(
        f"import pathlib; pathlib.Path({str(path)!r}).write_text({json.dumps(data)!r}){more}"
    )


def rows_of_kernels(tree_us: float) -> list[dict[str, Any]]:
    point = {"context": 32768, "batch": 1, "nodes": 31, "of_copy": 0.9}
    return [{**point, "kernel": "triton tree", "us": tree_us},
            {**point, "kernel": "triton chain", "us": 100.0}]  # fmt: skip


def test_steps_run_and_the_report_says_what_came_of_them(tmp_path: Path) -> None:
    rows = rows_of_kernels(120.0)
    todo = [
        Step("doctor", script("import json; print(json.dumps({'kernel': 'triton'}))"), 30),
        Step("times", write_result(tmp_path, "gpu_kernels_page16", rows), 30, "gpu_kernels_page16"),
        Step("broken", script("raise SystemExit('no device')"), 30, "nothing"),
        # What a step wrote before its time was up counts.
        Step("slow", write_result(tmp_path, "gpu_smollm", [{"part": "smollm", "dtype": "float32",
             "batch": 1, "nodes": 16, "same_output": True}], "; import time; time.sleep(60)"), 2,
             "gpu_smollm"),
    ]  # fmt: skip
    report = full_report.run_all(todo, tmp_path, KEY)
    assert json.loads((tmp_path / "gpu_report.json").read_text()) == report
    status = {name: record["status"] for name, record in report["steps"].items()}
    assert status == {"doctor": "ok", "times": "ok", "broken": "failed", "slow": "out of time"}
    assert report["steps"]["doctor"]["result"] == {"kernel": "triton"}
    assert "no device" in report["steps"]["broken"]["log"]
    outcomes = {line["what"].removesuffix(", batch 1"): line for line in report["predictions"]}
    beside_chain = outcomes["a tree beside a causal chain of as many rows, by time"]
    assert beside_chain["worst"] == pytest.approx(1.2) and beside_chain["holds"] is False
    of_copy = outcomes["bytes per second of a copy, up to 31 nodes over 32k tokens"]
    assert of_copy["holds"] is True and len(of_copy["values"]) == of_copy["count"] == 1
    assert outcomes["outputs of plain decoding in float32 (1: identical)"]["holds"] is True
    of_64 = "a step that verifies 64 nodes and drafts beside a plain step of an 8B model"
    assert outcomes[of_64]["count"] == 0
    page = (tmp_path / "gpu_report.html").read_text()
    assert "&lt;GPU &amp; co&gt;" in page and "<GPU" not in page
    assert "no device" in page and "not measured" in page and "32768 tokens" in page


def test_the_two_schemes_of_the_hopper_kernel_are_compared(tmp_path: Path) -> None:
    def outcome(us: float, nodes: int) -> dict[str, Any]:
        point = {"context": 32768, "batch": 1, "nodes": nodes, "of_copy": 0.5}
        rows = [{**point, "kernel": "cute tree", "us": 100.0},
                {**point, "kernel": "cute_ws tree", "us": us}]  # fmt: skip
        record = {"status": "ok", "result": {"name": "gpu_kernels_page16", "rows": rows}}
        report = full_report.report_of(KEY, {"times": record})
        (line,) = (p for p in report["predictions"] if p["what"].startswith("cute_ws (a producer)"))
        return line

    assert (outcome(89.0, 63)["holds"], outcome(95.0, 63)["holds"]) == (True, False)
    assert outcome(89.0, 31)["holds"] is None, "it is about 63 nodes"
    kernels = load_script("gpu/full_report").steps(
        Namespace(out=Path("out"), device="cuda", model=None, head=None)
    )
    timed = next(step for step in kernels if step.result == "gpu_kernels_page16")
    assert "cute_ws" in timed.command[timed.command.index("--kernels") + 1].split(",")
    grid = load_script("../bench/gpu/kernels").grid(quick=False)
    assert (32768, 1, 63) in grid[:20]


def test_what_ended_well_is_not_run_again(tmp_path: Path) -> None:
    def todo(tree_us: float, ends: int) -> list[Any]:
        rows = rows_of_kernels(tree_us)
        return [
            Step("times", write_result(tmp_path, "gpu_kernels", rows), 30, "gpu_kernels"),
            Step("second", script(f"raise SystemExit({ends})"), 30),
        ]

    first = full_report.run_all(todo(100.0, 1), tmp_path, KEY)
    again = full_report.run_all(todo(500.0, 0), tmp_path, KEY)
    assert again["steps"]["times"] == first["steps"]["times"]
    assert again["steps"]["second"]["status"] == "ok"
    other = full_report.run_all(todo(500.0, 0), tmp_path, {**KEY, "commit": "other"})
    assert other["steps"]["times"] != first["steps"]["times"], "another commit starts over"
    (tmp_path / "gpu_report.json").write_text("{")
    assert full_report.earlier_records(tmp_path, KEY) == {}


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of_kernels(100.0)
    todo = [
        Step("times", write_result(tmp_path, "gpu_kernels", rows), 30, "gpu_kernels"),
        Step("second", script("pass"), 30),
    ]
    stock = full_report.run_step

    def interrupted(step: Any, out: Path) -> Any:
        if step.name == "second":
            raise KeyboardInterrupt
        return stock(step, out)

    monkeypatch.setattr(full_report, "run_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        full_report.run_all(todo, tmp_path, KEY)
    assert set(full_report.earlier_records(tmp_path, KEY)) == {"times"}


def test_all_steps_take_at_most_fifteen_minutes() -> None:
    args = Namespace(out=Path("out"), device="cuda", model="some/model", head="some/head")
    todo = full_report.steps(args)
    assert sum(step.limit_s for step in todo) <= 900
    assert len({step.name for step in todo}) == len(todo)
    for step in todo[1:]:
        assert Path(step.command[1]).is_file(), step
    assert "some/head" in todo[-1].command


def test_flash_attention_is_checked_on_trees_that_it_reads() -> None:
    """Trees that lie apart, dense tails and places without a tree are left to Triton, whole."""
    import torch

    check = load_script("gpu/check")
    cpu = torch.device("cpu")
    checks = check.KernelChecks("flash", None, cpu)
    spec = check.ProblemSpec(((33, 9), (0, 2)), num_heads=2, num_kv_heads=1, head_dim=64)
    problem = check.Problem(checks.suited(spec), cpu)
    assert problem.meta.query_starts.tolist() == [0, 10, 13] and len(problem.query) == 13
    assert checks.unsupported(spec) is None
    assert checks.unsupported(spec.replace(dense=True)) and checks.unsupported(
        spec.replace(places=2)
    )
    apart = check.Problem(check.KernelChecks("triton", None, cpu).suited(spec), cpu)
    assert apart.meta.query_starts is None and len(apart.query) == 16
    assert "float32" in check.unsupported("cute", spec.replace(dtype=torch.float32), cpu)
