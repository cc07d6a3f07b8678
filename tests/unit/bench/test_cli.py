# SPDX-License-Identifier: Apache-2.0
"""The commands as they are typed, on a machine that is arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import vllm_specplug.bench.cli as cli
from tests.unit.bench.fakes import FakeMachine

runner = CliRunner()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMachine:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "a{i}"}}\n' for i in range(60)))
    monkeypatch.setattr(cli, "raise_on_termination", lambda: None)
    monkeypatch.setattr(cli, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(cli, "prepare_target", lambda name, progress: tmp_path / "smollm2")
    monkeypatch.setattr(cli, "default_head", lambda target: str(tmp_path / "head"))
    monkeypatch.setenv("COLUMNS", "200")
    return FakeMachine(monkeypatch)


def bench(folder: Path, *args: str) -> Any:
    where = ["--data", str(folder / "a.jsonl"), "--out", str(folder / "out")]
    return runner.invoke(cli.bench_app, [*where, *args])


def test_bench_writes_numbers_and_a_figure(tmp_path: Path, machine: FakeMachine) -> None:
    result = bench(tmp_path, "--servers", "plain,jetspec-16", "--points", "3")
    assert result.exit_code == 0, result.output
    assert "| all at once | jetspec-16 |" in result.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["points"]) == 2 * 5
    assert machine.started[1].speculative_config["model"] == str(tmp_path / "head")
    for name in ("results.csv", "results.md", "results.svg", "cells.jsonl"):
        assert (tmp_path / "out" / name).stat().st_size > 0


@pytest.mark.parametrize(("flags", "execution"), [((), "compiled"), (("--eager",), "eager")])
def test_all_servers_run_alike_and_the_results_say_how(
    tmp_path: Path, machine: FakeMachine, flags: tuple[str, ...], execution: str
) -> None:
    result = bench(tmp_path, "--servers", "plain,jetspec-16", "--rates", "1", *flags)
    assert result.exit_code == 0, result.output
    for spec in machine.started:
        assert ("--enforce-eager" in spec.arguments(1)) == (execution == "eager")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["provenance"]["execution"] == execution
    assert f", {execution}; " in (tmp_path / "out" / "results.md").read_text()


def test_flags_come_on_top_of_a_file(tmp_path: Path, machine: FakeMachine) -> None:
    config = tmp_path / "plan.yaml"
    config.write_text("servers: [plain, ngram]\nrates: [1, 2]\noutput_len: 32\n")
    server = 'eagle={"method": "eagle3", "model": "E"}'
    result = bench(tmp_path, "--config", str(config), "--rates", "0.5", "--server", server)
    assert result.exit_code == 0, result.output
    assert [(name, level) for name, level, _ in machine.runs] == [
        ("plain", "rate=0.5"), ("ngram", "rate=0.5"), ("eagle", "rate=0.5"),
    ]  # fmt: skip
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["plan"]["output_len"] == 32


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rates", "0,1"], "a request rate must be above 0 requests/s, not 0"),
        (["--rates", "fast"], "--rates 'fast' is not a list of numbers"),
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--concurrency", "1,x"], "--concurrency '1,x' is not a list of numbers"),
    ],
)
def test_bad_input_is_one_message_and_status_2(
    tmp_path: Path, machine: FakeMachine, args: list[str], message: str
) -> None:
    result = bench(tmp_path, *args)
    assert result.exit_code == 2 and message in result.output, result.output
    assert "Traceback" not in result.output and machine.started == []


def test_no_data_is_said(tmp_path: Path, machine: FakeMachine) -> None:
    result = runner.invoke(cli.bench_app, ["--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "no prompts: point --data at" in result.output


def test_a_sweep_that_lost_a_server_keeps_the_rest(tmp_path: Path, machine: FakeMachine) -> None:
    machine.die_at = ("ngram", "rate=2")
    args = ("--servers", "plain,ngram", "--rates", "1,2")
    result = bench(tmp_path, *args)
    assert result.exit_code == 1
    assert "1 runs are missing: run the same command again" in result.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["points"]) == 3
    assert "died at 2/s" in results["servers"][1]["failure"]
    machine.die_at = None
    assert bench(tmp_path, *args).exit_code == 0
    assert len(machine.runs) == 4


def test_without_plain_vllm_the_sweep_ends(tmp_path: Path, machine: FakeMachine) -> None:
    machine.broken = {"plain"}
    result = bench(tmp_path)
    assert result.exit_code == 1 and "(plain) exited with status 1" in result.output


def test_interrupt_and_time_limit_have_their_own_status(
    tmp_path: Path, machine: FakeMachine
) -> None:
    result = bench(tmp_path, "--time-limit", "0")
    assert result.exit_code == cli.INCOMPLETE and "time limit is reached" in result.output
    machine.interrupt_after = 2
    result = bench(tmp_path)
    assert result.exit_code == 130 and "run the same command again" in result.output
