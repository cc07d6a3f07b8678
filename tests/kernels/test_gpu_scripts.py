# SPDX-License-Identifier: Apache-2.0
"""Dry runs of what checks and times kernels on a machine with a GPU, in Triton's interpreter.

FlashAttention, which this machine's vLLM lacks, is a function of torch; the Hopper kernels, which
no interpreter runs, must be left out with a reason.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.flash_attention import Attention
from vllm_specplug.kernels import tree_attn_flash
from vllm_specplug.kernels.cuda_dispatch import CUDA_KERNELS, load_kernel

pytestmark = pytest.mark.usefixtures("interpreter")

Run = Callable[..., dict[str, Any]]


class Rows:
    """A report in memory."""

    is_out_of_time = False

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def row(self, **values: Any) -> None:
        self.rows.append(values)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Attention:
    """In FlashAttention's place."""
    made = Attention()
    # The interpreter's products of half precision are not what is looked at here.
    monkeypatch.setattr(tree_attn_flash, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(tree_attn_flash, "context_attention", lambda head_dim, capped: made)
    return made


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: Attention) -> Run:
    """Runs a script's `main` on the CPU with `arguments`; what it wrote to `result`.json."""

    def run(script: ModuleType, result: str, *arguments: str, status: int = 0) -> dict[str, Any]:
        command = ["script.py", "--device", "cpu", "--out", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        assert script.main() == status
        return json.loads((tmp_path / f"{result}.json").read_text())

    return run


def test_one_list_names_the_kernels_that_scripts_run() -> None:
    problems = import_module("scripts.gpu.problems")
    assert {*problems.TREE_KERNELS, "reference"} == set(CUDA_KERNELS)


def test_sweeps_give_arguments_that_kernels_take() -> None:
    kernels = import_module("bench.gpu.kernels")
    for name in kernels.TREE_KERNELS:
        for option in kernels.sweep_options(name):
            inspect.signature(load_kernel(name)).bind_partial(**option)
    with pytest.raises(TypeError):
        inspect.signature(load_kernel("flash")).bind_partial(**kernels.sweep_options("triton")[0])


def test_kernels_are_checked(dry_run: Run) -> None:
    report = dry_run(import_module("scripts.gpu.check"), "gpu_check")
    status = {name: part["status"] for name, part in report["parts"].items()}
    for kernel in ("triton", "flash"):
        for part in ("self-test", "correctness", "races"):
            assert status.pop(f"{kernel}: {part}") == "ok", report["parts"]
    for part in ("words, builder, walk, compaction", "partial caches"):
        assert status.pop(part) == "ok", report["parts"]
    assert status == {"cute: self-test": "skipped"}
    assert report["parts"]["cute: self-test"]["reason"]


def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check = import_module("scripts.gpu.check")

    # It leaves every tree's last row as it finds it.
    def short(query: Any, key: Any, value: Any, output: Any, meta: Any, *rest: Any) -> None:
        before = output.clone()
        load_kernel("triton")(query, key, value, output, meta, *rest)
        last = meta.plan[1] + meta.plan[2] - 1
        output[last] = before[last]

    monkeypatch.setattr(check.cuda_dispatch, "load_kernel", lambda name: short)
    report = Rows()
    checks = check.KernelChecks("triton", report, torch.device("cpu"))
    record: dict[str, Any] = {}
    with pytest.raises(AssertionError, match="1 of 1 cases differ"):
        checks.correctness(record, [check.specs("cpu")[0].replace(trees=((7, 2),))], 1.0)
    assert "a row was not written" in report.rows[0]["failed"]
    assert report.rows[0]["failed"] in record["failures"][0]


def test_kernels_are_timed(dry_run: Run, attention: Attention, tmp_path: Path) -> None:
    report = dry_run(import_module("bench.gpu.kernels"), "gpu_kernels_page16")
    assert {part["status"] for part in report["parts"].values()} == {"ok"}, report["parts"]
    rows = report["rows"]
    assert not [row for row in rows if "failed" in row]
    timed = {row["kernel"] for row in rows if "context" in row and "us" in row}
    assert timed == {f"{k} {kind}" for k in ("triton", "flash") for kind in ("tree", "chain")}
    assert {row["sweep"] for row in rows if row.get("time_us", 0) > 0} == {"triton", "flash"}
    assert attention.splits == {0, 1}, "its own choice is timed, and what the sweep gives"
    assert {row["kernel"] for row in rows if "missing" in row} == {"cute"}
    table = (tmp_path / "gpu_kernels_page16.md").read_text()
    assert "| triton |" in table and "| flash |" in table
