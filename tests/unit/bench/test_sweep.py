# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.fakes import FakeMachine, make_sweep
from vllm_specplug.bench.load import LoadError
from vllm_specplug.bench.server import ServerError
from vllm_specplug.bench.sweep import Outcome, Sweep, found_rates

LEVELS = 2 + 5


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(monkeypatch)


def text_of(sweep: Sweep) -> str:
    file = sweep.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_servers_follow_one_another_on_the_same_traffic(
    tmp_path: Path, machine: FakeMachine
) -> None:
    assert make_sweep(tmp_path).run() == Outcome()
    assert [spec.name for spec in machine.started] == ["plain", "ngram", "jetspec-16"]
    by_server: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for name, level, prompts in machine.runs:
        by_server.setdefault(name, []).append((level, prompts))
    assert by_server["plain"] == by_server["ngram"] == by_server["jetspec-16"]
    levels = [level for level, _ in by_server["plain"]]
    assert len(levels) == LEVELS and levels[:2] == ["concurrency=1", "burst"]
    prompts = by_server["plain"][0][1]
    assert {text[0] for text in prompts} == {"a", "b"}


def test_rates_go_from_idle_to_past_saturation(tmp_path: Path, machine: FakeMachine) -> None:
    sweep = make_sweep(tmp_path, points=4)
    sweep.run()
    levels = sweep.levels()
    assert levels is not None
    rates = [level.rate for level in levels if level.rate is not None]
    assert len(rates) == 4
    steps = [b / a for a, b in zip(rates, rates[1:], strict=False)]
    assert max(steps) / min(steps) < 1.02, "geometric"
    plain = {level: prompts for name, level, prompts in machine.runs if name == "plain"}
    saturated = 16 / (128 * 40e-3 * (1 + 0.02 * 16))
    assert rates[-1] == pytest.approx(1.5 * saturated, rel=0.01)
    assert len(plain[f"rate={rates[-1]:g}"]) > len(plain["concurrency=1"])


def test_found_rates_where_batches_gain_nothing() -> None:
    rates = found_rates(2.0, 1.0, 3)
    assert len(rates) == 3 and rates == tuple(sorted(rates)) and rates[-1] == 1.5


def test_given_rates_and_concurrencies(tmp_path: Path, machine: FakeMachine) -> None:
    make_sweep(tmp_path, rates=[0.5, 2], concurrency=[4], servers="plain").run()
    assert [level for _, level, _ in machine.runs] == ["rate=0.5", "rate=2", "concurrency=4"]


def test_repeats_get_other_prompts(tmp_path: Path, machine: FakeMachine) -> None:
    make_sweep(tmp_path, rates=[0.5], repeats=2, servers="plain").run()
    (_, _, first), (_, _, second) = machine.runs
    assert len(first) == len(second) and set(first).isdisjoint(second)


def test_together_servers_take_turns_and_the_others_are_paused(
    tmp_path: Path, machine: FakeMachine
) -> None:
    make_sweep(tmp_path, together=True, rates=[0.5], concurrency=[4], repeats=2).run()
    order = [(name, level) for name, level, _ in machine.runs]
    servers = ["plain", "ngram", "jetspec-16"]
    assert [name for name, _ in order[:6]] == [*servers, "ngram", "jetspec-16", "plain"]
    assert {level for _, level in order[:3]} == {"rate=0.5"}
    assert {level for _, level in order[3:6]} == {"concurrency=4"}
    # The machine itself asserts that nobody else is awake. Every server saw the same.
    assert len(order) == 12 and [spec.name for spec in machine.started] == servers


def test_data_sets_are_measured_alone(tmp_path: Path, machine: FakeMachine) -> None:
    values = {"rates": [], "dataset_requests": 5, "servers": "plain"}
    make_sweep(tmp_path, **values).run()
    assert [(level, {p[0] for p in prompts}) for _, level, prompts in machine.runs] == [
        ("concurrency=4", {"a"}),
        ("concurrency=4", {"b"}),
    ]
    make_sweep(tmp_path, **values | {"dataset_requests": 6}).run()
    assert [len(prompts) for _, _, prompts in machine.runs] == [5, 5, 6, 6]


def test_an_interrupted_sweep_continues_where_it_was(tmp_path: Path, machine: FakeMachine) -> None:
    machine.interrupt_after = LEVELS + 3
    with pytest.raises(KeyboardInterrupt):
        make_sweep(tmp_path).run()
    assert machine.awake == set(), "servers were stopped"
    cells = tmp_path / "out" / "cells.jsonl"
    cells.write_text(cells.read_text() + '\n{"digest": "cut off')
    machine.interrupt_after = None
    machine.started.clear()
    assert make_sweep(tmp_path).run() == Outcome()
    assert len(machine.runs) == 3 * LEVELS == len({(n, level) for n, level, _ in machine.runs})
    assert [spec.name for spec in machine.started] == ["ngram", "jetspec-16"]
    machine.started.clear()
    make_sweep(tmp_path).run()
    assert machine.started == []


def test_a_server_that_dies_is_named_and_the_others_go_on(
    tmp_path: Path, machine: FakeMachine
) -> None:
    machine.die_at = ("ngram", "burst")
    sweep = make_sweep(tmp_path)
    outcome = sweep.run()
    assert outcome.num_missing == LEVELS - 1
    assert set(outcome.failures) == {"ngram"}
    assert "died at all at once" in outcome.failures["ngram"]
    assert "out of memory" in text_of(sweep) and "what it has is kept" in text_of(sweep)
    assert len([run for run in machine.runs if run[0] == "jetspec-16"]) == LEVELS
    machine.die_at = None
    assert make_sweep(tmp_path).run() == Outcome()
    assert len(machine.runs) == 3 * LEVELS


def test_a_load_that_fails_leaves_the_rest(tmp_path: Path, machine: FakeMachine) -> None:
    machine.refuse_at = ("jetspec-16", "burst")
    outcome = make_sweep(tmp_path).run()
    assert outcome.num_missing == 1 and "3 of 8 requests" in outcome.failures["jetspec-16"]


def test_a_server_that_does_not_start_is_left_out(tmp_path: Path, machine: FakeMachine) -> None:
    machine.broken = {"ngram"}
    outcome = make_sweep(tmp_path).run()
    assert outcome.num_missing == LEVELS and "exited with status 1" in outcome.failures["ngram"]
    assert len(machine.runs) == 2 * LEVELS


def test_without_the_baseline_nothing_is_measured(tmp_path: Path, machine: FakeMachine) -> None:
    machine.broken = {"plain"}
    with pytest.raises(ServerError, match=r"\(plain\) exited"):
        make_sweep(tmp_path).run()
    machine.broken = set()
    machine.die_at = ("plain", "burst")
    with pytest.raises(LoadError):
        make_sweep(tmp_path).run()
    assert [level for _, level, _ in machine.runs] == ["concurrency=1"]
    machine.die_at = None
    assert make_sweep(tmp_path).run() == Outcome()


def test_what_cannot_run_here_is_said_and_not_missed(tmp_path: Path, machine: FakeMachine) -> None:
    sweep = make_sweep(tmp_path, servers="plain,suffix")
    assert sweep.run() == Outcome()
    assert "suffix is left out: needs arctic-inference" in text_of(sweep)
    assert [spec.name for spec in machine.started] == ["plain"]


def test_a_time_limit_stops_between_runs(tmp_path: Path, machine: FakeMachine) -> None:
    outcome = make_sweep(tmp_path).run(time_limit_s=0.0)
    assert outcome == Outcome(3 * LEVELS, {}, out_of_time=True) and machine.runs == []
    assert make_sweep(tmp_path).run(time_limit_s=600.0) == Outcome()


@pytest.mark.parametrize("change", [{"output_len": 64}, {"head": "other"}, {"max_num_seqs": 8}])
def test_results_of_other_settings_are_not_used(
    tmp_path: Path, machine: FakeMachine, change: dict[str, Any]
) -> None:
    make_sweep(tmp_path, rates=[1.0]).run()
    other = make_sweep(tmp_path, rates=[1.0], **change)
    # Plain vLLM and its ngram do not change with the head.
    kept = 2 if "head" in change else 0
    assert other.num_done == kept
    other.run()
    assert "measured with other settings, prompts or code" in text_of(other)
    assert len(machine.runs) == 6 - kept


def test_more_servers_and_rates_keep_what_is_measured(tmp_path: Path, machine: FakeMachine) -> None:
    make_sweep(tmp_path, rates=[1.0], servers="plain,ngram").run()
    make_sweep(tmp_path, rates=[1.0, 2.0], repeats=2).run()
    assert len(machine.runs) == 3 * 2 * 2
