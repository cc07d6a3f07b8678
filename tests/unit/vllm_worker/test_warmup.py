# SPDX-License-Identifier: Apache-2.0
"""Drafting for requests that do not exist leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.vllm_worker.clocked_runner import ClockedRunner
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.vllm_worker import warmup as module
from vllm_specplug.vllm_worker.warmup import dummy_requests, warm_up_draft


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a device; it counts how often it was waited for."""
    monkeypatch.setattr(module, "any_failed", bool)
    made: Any = ClockedRunner()
    made.device, made.waits = torch.device("meta"), []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: made.waits.append(1))
    return made


def test_warm_up_drafts_every_depth(runner: Any) -> None:
    warm_up_draft(runner.state)
    drafter = runner.drafter.drafter
    seen = [(requests.context_lens, requests.forward_depths) for requests in drafter.seen]
    assert seen == [([context], [depth]) for context in (7, 1020) for depth in (1, 2, 3)]
    for requests in drafter.seen:
        (tokens,) = requests.token_ids
        assert len(tokens) == requests.context_lens[0] + 1 and tokens.min() > 0
    assert drafter.forgotten == {"specplug-warmup-0"} and len(runner.waits) == 1
    # On a device it drafts as steps do.
    drafter.drafts_on_device, runner.tree_backend.is_host = True, False
    runner.device = torch.device("cpu")
    with dummy_requests(runner.state, 2, 3, nodes=5) as given:
        assert isinstance(given, DeviceRequests) and given.max_depth == 3
        assert given.budgets.tolist() == [5, 5] and given.history is not None
        for line, tokens in enumerate(given.history.token_ids):
            assert given.anchors[line] == tokens[given.context_lens[line]]
    # A method without a forward has nothing to warm up.
    drafter.warmup_depth = 0
    warm_up_draft(runner.state)
    assert len(drafter.seen) == 6


def test_a_draft_that_fails_is_forgotten_too(runner: Any) -> None:
    runner.drafter.options.vocab_size = 20
    with pytest.raises(ZeroDivisionError), dummy_requests(runner.state, 2, 3) as requests:
        raise ZeroDivisionError
    assert [len(tokens) for tokens in requests.token_ids] == [8, 8]
    # Requests differ, so that their rows take different experts.
    first, second = (set(tokens.tolist()) for tokens in requests.token_ids)
    assert first.isdisjoint(second) and max(first | second) < 20
    assert runner.drafter.drafter.forgotten == {"specplug-warmup-0", "specplug-warmup-1"}


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_warm_before_vllm_watches_what_compiles(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """vLLM raises on a late compilation with --jit-monitor-mode=error; and it has seeded by then,
    so its generators must not move."""
    from vllm_specplug.vllm_v2 import worker_gpu

    done: list[str] = []
    runner: Any = object.__new__(worker_gpu.DeviceRunnerMixin)
    runner.state = None
    monkeypatch.setattr(
        worker_gpu.TreeRunnerMixin, "start_budget", lambda self: done.append("budget")
    )

    def draft(given: Any) -> None:
        if fails:
            raise RuntimeError("cannot draft")
        done.append(f"draft {torch.rand(()) >= 0}")

    monkeypatch.setattr(worker_gpu, "warm_up_draft", draft)
    monkeypatch.setattr(
        worker_gpu.Worker, "_maybe_activate_jit_monitor", lambda self: done.append("monitor")
    )
    worker = object.__new__(worker_gpu.TreeGPUWorker)
    worker.model_runner, worker.device = runner, torch.device("cpu")
    before = torch.get_rng_state()
    if fails:
        with pytest.raises(RuntimeError, match="cannot draft"):
            worker._maybe_activate_jit_monitor()
        assert "monitor" not in done
        return
    worker._maybe_activate_jit_monitor()
    assert done == ["draft True", "budget", "monitor"]
    assert torch.equal(torch.get_rng_state(), before)
