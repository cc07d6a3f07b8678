# SPDX-License-Identifier: Apache-2.0
"""The engines of a report of a GPU: how many start, what is left out when time is short, and what
is said of their outputs. No engine runs."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scripts import load_script

e2e = load_script("../bench/gpu/e2e")


class Report:
    """A report in memory."""

    def __init__(self, seconds_left: float) -> None:
        self.seconds_left = seconds_left
        self.rows: list[dict[str, Any]] = []

    def row(self, **values: Any) -> None:
        self.rows.append(values)


class Engines(e2e.Bench):
    """Each starts in `start_s` of the report's time; trees answer as plain decoding, unless of
    `wrong` nodes."""

    def __init__(self, folder: Path, seconds_left: float, start_s: float, wrong: int = 0) -> None:
        args = Namespace(
            device="cpu", attention=None, eager=False, compilation=None, model=None, head=None
        )
        super().__init__(args, Report(seconds_left), folder)
        # As on a GPU, with nothing to load.
        self.on_gpu, self.start_s, self.wrong = True, start_s, wrong
        self.started: list[tuple[dict[str, Any], dict[str, Any] | None]] = []

    def run(
        self, engine: dict[str, Any], calls: list[dict[str, Any]],
        speculative: dict[str, Any] | None = None, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        self.check_time()
        self.report.seconds_left -= self.start_s
        self.longest_start_s = max(self.longest_start_s, self.start_s)
        self.started.append((engine, speculative))
        answer = {"seconds": 1.0, "first_token_seconds": 0.1, "generated": 9, "drafts": 3.0,
                  "accepted": 6.0, "phases_ms": {}}  # fmt: skip
        return {
            "kernel": [], "start_seconds": self.start_s,
            "calls": [
                {**call, **answer, "token_ids": [[1 + (call.get("nodes") == self.wrong > 0)]]}
                for call in calls
            ],
        }  # fmt: skip

    def dummy_target(self) -> Path:
        return self.folder

    dummy_head = stock_head = dummy_target


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the demo's model."""
    tokenizer = Namespace(apply_chat_template=lambda messages, **more: [3, 7, len(messages)])
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: tokenizer)
    monkeypatch.setattr("vllm_specplug.targets.prepare_target", lambda name, say: Path("smollm2"))


def outcome(bench: Engines, name: str) -> tuple[dict[str, Any], str | None]:
    """What a part records, and why it ended early."""
    record: dict[str, Any] = {}
    try:
        getattr(bench, name)(record)
    except (e2e.OutOfTime, AssertionError) as error:
        return record, f"{type(error).__name__}: {error}"
    return record, None


def test_four_engines_compare_both_budgets_in_both_dtypes(tmp_path: Path, prompts: None) -> None:
    bench = Engines(tmp_path, seconds_left=190.0, start_s=40.0)
    record, early = outcome(bench, "smollm")
    assert early is None
    dtypes = [engine["dtype"] for engine, _ in bench.started]
    assert dtypes == ["float32"] * 2 + ["bfloat16"] * 2
    # What is compared for its outputs compiles nothing.
    eager = [engine.get("enforce_eager", False) for engine, _ in bench.started]
    assert eager == [True, True, False, False]
    assert record["same_output"] == {
        f"{dtype} {nodes} B{batch}": True
        for dtype in ("float32", "bfloat16") for nodes in (16, 64) for batch in (4, 1)
    }  # fmt: skip
    # Warm-up calls are no rows: four prompts together and two alone, of each budget and dtype.
    assert len(bench.report.rows) == 2 * 2 * 3


def test_an_engine_that_would_be_cut_short_is_not_started(tmp_path: Path, prompts: None) -> None:
    bench = Engines(tmp_path, seconds_left=189.0, start_s=70.0)
    record, early = outcome(bench, "smollm")
    # float32 comes first: whether trees are lossless is known whatever time there is.
    assert len(bench.started) == 2 and len(record["same_output"]) == 4
    assert early == "OutOfTime: 49 s are left, and an engine took 70 s to start"


def test_outputs_that_differ_fail_also_when_time_runs_out(tmp_path: Path, prompts: None) -> None:
    for seconds in (1000.0, 189.0):
        bench = Engines(tmp_path, seconds, start_s=70.0, wrong=64)
        record, early = outcome(bench, "smollm")
        wrong = ["float32 64 B4", "float32 64 B1"]
        assert early == f"AssertionError: outputs differ in float32: {wrong}"
        assert record["same_output"]["float32 16 B4"] is True


def test_a_stock_chain_is_timed_per_step(tmp_path: Path) -> None:
    bench = Engines(tmp_path, 500.0, start_s=50.0)
    assert outcome(bench, "stock")[1] is None
    ((engine, chain),) = bench.started
    assert engine["load_format"] == "dummy" and chain is not None
    assert (chain["method"], chain["num_speculative_tokens"]) == ("eagle3", 3)
    first, *_, last = bench.report.rows
    assert first["part"] == "stock" and first["nodes"] == 3
    # 0.9 seconds behind the first token, three drafts; of eight requests three make less than one.
    assert first["step_ms"] == pytest.approx(300.0) and last["step_ms"] == pytest.approx(900.0)


def test_a_part_without_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the report's own words, as a part that was left out, not as a failure."""

    def late(bench: Any, record: dict[str, Any]) -> None:
        raise e2e.OutOfTime("5 s are left")

    monkeypatch.setattr(e2e.Bench, "ar", late)
    arguments = ["e2e.py", "--device", "cpu", "--parts", "ar", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert e2e.main() == 0
    part = json.loads((tmp_path / "gpu_e2e.json").read_text())["parts"]["ar"]
    assert (part["status"], part["reason"]) == ("skipped", "5 s are left")
