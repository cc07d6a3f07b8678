# SPDX-License-Identifier: Apache-2.0
"""Drafting for requests that do not exist leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_specplug.vllm_worker import warmup as module
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.warmup import dummy_requests, warm_up_draft


class _Drafter:
    attends_context = False
    warmup_depth = 3

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        self.forgotten: list[str] = []

    def propose(self, requests: Any) -> None:
        (tokens,) = requests.token_ids
        assert len(tokens) == requests.context_lens[0] + 1 and tokens.min() > 0
        self.seen.append((requests.context_lens, requests.forward_depths))

    def warmup(self, requests: Any) -> None:
        self.propose(requests)

    def forget(self, req_ids: list[str]) -> None:
        self.forgotten += req_ids


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a device; it counts how often it was waited for."""
    monkeypatch.setattr(module, "any_failed", bool)
    options = SimpleNamespace(num_nodes=8, tree_width=4, vocab_size=20)
    runner = SimpleNamespace(
        drafter=SimpleNamespace(drafter=_Drafter(), options=options),
        device=torch.device("meta"),
        max_model_len=1000,
        waits=0,
    )

    def wait() -> None:
        runner.waits += 1

    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    return RunnerView(runner)


def test_warm_up_drafts_every_depth(state: Any) -> None:
    warm_up_draft(state)
    depths = (1, 2, 3)
    assert state.drafter.seen == [([context], [d]) for context in (7, 996) for d in depths]
    assert set(state.drafter.forgotten) == {"specplug-warmup-0"}
    assert state.runner.waits == 1


def test_a_method_without_a_forward_has_nothing_to_warm_up(state: Any) -> None:
    state.drafter.warmup_depth = 0
    warm_up_draft(state)
    assert not state.drafter.seen


def test_a_draft_that_fails_is_forgotten_too(state: Any) -> None:
    state.drafter.propose = lambda requests: 1 // 0
    with pytest.raises(ZeroDivisionError), dummy_requests(state, 2, 3) as requests:
        state.drafter.propose(requests)
    assert [len(tokens) for tokens in requests.token_ids] == [8, 8]
    # Requests differ, so that their rows take different experts.
    first, second = (set(tokens.tolist()) for tokens in requests.token_ids)
    assert first.isdisjoint(second) and max(first | second) < 20
    assert state.drafter.forgotten == ["specplug-warmup-0", "specplug-warmup-1"]


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_warm_before_vllm_watches_what_compiles(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """vLLM raises on a late compilation with --jit-monitor-mode=error; and it has seeded by then,
    so its generators must not move."""
    from vllm_specplug.vllm_v2 import worker_gpu

    done: list[str] = []
    runner = SimpleNamespace(state=None, start_budget=lambda: done.append("budget"))

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
