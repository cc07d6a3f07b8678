# SPDX-License-Identifier: Apache-2.0
"""Calibrations take bounded time; `test_ranks` has those of several replicas."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.vllm_worker.clocked_runner import ClockedRunner
from vllm_specplug.vllm_worker.cost import calibration as module
from vllm_specplug.vllm_worker.cost.step_clock import DeviceClock
from vllm_specplug.vllm_worker.runner_view import RunnerView


def test_measures_rows_context_and_drafts() -> None:
    runner = ClockedRunner(row_ms=0.2)
    measured = runner.measure()
    assert measured.rows[0] == 1 and measured.rows[-1] == 64
    assert measured.forward_ms[-1] > measured.forward_ms[0] + 5
    assert measured.logits_ms == pytest.approx([0.1] * len(measured.rows))
    assert measured.attention_ms > 0
    drafter = runner.drafter.drafter
    assert (len(drafter.seen[0]), drafter.seen[0].forward_depths) == (1, [3])
    assert measured.draft_rows == (2.0, 4.0, 16.0, 64.0)
    assert len(drafter.forgotten) == 16


def test_stops_in_time_with_what_it_has() -> None:
    measured = ClockedRunner(row_ms=20.0).measure(time_limit_s=0.3)
    assert 2 <= len(measured.rows) < 8
    assert measured.rows[0] == 1


@pytest.mark.parametrize("what", ["forward", "logits", "adapters", "draft"])
def test_what_cannot_be_measured_does_not_start(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no such product")

    runner: Any = ClockedRunner()
    owner, name = {
        "forward": (runner, "_dummy_run"),
        "logits": (runner.model, "compute_logits"),
        "adapters": (runner.state, "dummy_adapters"),
        "draft": (runner.drafter.drafter, "propose"),
    }[what]
    setattr(owner, name, fail)
    monkeypatch.setattr(module, "first_worker_values", lambda values: values)
    monkeypatch.setattr(module, "any_failed", bool)
    with pytest.raises(RuntimeError, match="ValueError: no such product.*tree_budget") as raised:
        module.start_budget(runner.planner, runner.state)
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize("start", [0.0, 0.4, 1.2, 2.5])
def test_a_machine_busy_for_a_second_spoils_no_size(start: float) -> None:
    """Meanwhile everything takes three times as long."""
    idle, busy = (ClockedRunner(row_ms=1.0, base_ms=40.0) for _ in range(2))
    expected, take = idle.measure(), busy.take
    busy.take = lambda seconds: take(  # type: ignore[method-assign]
        seconds * (3.0 if start <= busy.now < start + 1.0 else 1.0)
    )
    measured = busy.measure()
    assert len(measured.rows) >= 6
    forward_ms = dict(zip(expected.rows, expected.forward_ms, strict=True))
    assert measured.forward_ms == pytest.approx([forward_ms[rows] for rows in measured.rows])
    assert measured.draft_ms == pytest.approx(expected.draft_ms)
    assert busy.now < 1.5 * module.TIME_LIMIT_S


@pytest.mark.parametrize(
    ("requests", "length"),
    [(16, 1024), (3, 40), (1, 24), (64, 9), (1, 16), (3, 10), (1, 1), (2, 1000)],
)
def test_dummy_batches_attend_the_context_and_no_more_than_their_block_tables(
    requests: int, length: int
) -> None:
    """Kernels read the table of a request of the whole context, and past its end after that."""
    runner = ClockedRunner()
    runner.scheduler_config.max_num_seqs, runner.max_model_len = requests, length
    forward, seen = runner._dummy_run, []

    def dummy_run(rows: int, context_len: int, **kwargs: Any) -> Any:
        # Rows are spread evenly, one more on the last ones.
        seen.append((rows, context_len + -(-rows // min(rows, requests))))
        return forward(rows, context_len, **kwargs)

    runner._dummy_run = dummy_run  # type: ignore[method-assign]
    assert runner.measure().rows[0] == 1
    short = min(64, length - 1)
    assert {attended for rows, attended in seen if rows <= short} >= {short} - {0}
    assert all(0 < attended <= length for _, attended in seen), seen


def device_runner(
    monkeypatch: pytest.MonkeyPatch, nodes: int = 8
) -> tuple[ClockedRunner, list[tuple[int, bool]]]:
    """A runner whose requests read their context once, and the rows of its forwards with whether
    they were of whole trees."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    runner, calls = ClockedRunner(), []
    runner.device, runner.max_num_tokens, runner.max_model_len = torch.device("meta"), 2048, 2048
    runner.scheduler_config.max_num_seqs = 128
    runner.drafter.options.num_nodes = nodes

    def dummy_run(
        rows: int, context_len: int, *, randomize_inputs: bool, uniform_decode: bool = False
    ) -> Any:
        # Rows of equal tokens would all take the same experts.
        assert randomize_inputs
        requests = rows // (nodes + 1) if uniform_decode else min(rows, 128)
        context = context_len + -(-rows // requests)
        calls.append((rows, uniform_decode))
        reads = 1e-6 * requests * context + 2e-8 * (rows - requests) * context
        runner.take(0.005 + 1e-5 * rows + reads)
        return torch.zeros(rows, 4), None

    runner._dummy_run = dummy_run  # type: ignore[method-assign, assignment]
    return runner, calls


@pytest.mark.parametrize(("limit", "most"), [(None, 1024), (300, 256)])
@pytest.mark.parametrize("nodes", [8, 200])
def test_on_a_device_nodes_do_not_read_the_context_again(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, most: int, nodes: int
) -> None:
    """Calls are launched ahead, and a tree's rows share what they read."""
    runner, calls = device_runner(monkeypatch, nodes)
    runner.vllm_config.speculative_config.max_step_rows = limit
    measured = runner.measure()
    # Milliseconds.
    assert measured.context_ms == pytest.approx(1e-3, rel=0.01)
    assert measured.attention_ms == pytest.approx(2e-5, rel=0.01)
    # No step has more rows with logits.
    assert measured.rows[-1] == most
    assert calls[1:5] == [(1, False)] * (module._DEVICE_CALLS + 1)


def test_on_a_device_the_hosts_part_of_a_call_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It launches in 1 to 4 ms what takes 5 ms and more."""
    runner, _ = device_runner(monkeypatch)
    launches = itertools.cycle([0.001, 0.004, 0.002])
    passed = 0.0

    def take(seconds: float) -> None:
        nonlocal passed
        runner.now += next(launches)
        passed = max(passed, runner.now) + seconds

    class Event:
        def record(self) -> None:
            self.at = passed

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    def wait() -> None:
        runner.now = max(runner.now, passed)

    def dummy_run(rows: int, **kwargs: Any) -> Any:
        take(0.005 + 1e-5 * rows)
        return torch.zeros(rows, 4), None

    runner._dummy_run, runner.take = dummy_run, take  # type: ignore[method-assign, assignment]
    runner.planner.clock = DeviceClock(Event)  # type: ignore[arg-type, assignment]
    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    measured = runner.measure()
    expected = [5.0 + 0.01 * rows for rows in measured.rows]
    assert measured.forward_ms == pytest.approx(expected)


def test_layers_with_a_state_get_no_rows_of_trees_without_their_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, calls = device_runner(monkeypatch)
    monkeypatch.setattr(RunnerView, "state_layers", SimpleNamespace(names=("layer",)))
    monkeypatch.setattr(RunnerView, "tree_forward", RunnerView.dummy_forward)
    measured = runner.measure()
    assert not any(are_trees for _, are_trees in calls)
    assert measured.attention_ms == measured.context_ms > 0
