# SPDX-License-Identifier: Apache-2.0
"""Drafting for requests that do not exist leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_specplug.vllm_v1.rehearsal import warm_up_sampling
from vllm_specplug.vllm_v1.runner_state import RunnerState
from vllm_specplug.vllm_worker import rehearsal as module
from vllm_specplug.vllm_worker.rehearsal import rehearsal, warm_up_draft


class _Drafter:
    rehearsed_depth = 3

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int], int]] = []
        self.forgotten: list[str] = []

    def propose(self, requests: Any) -> None:
        (tokens,) = requests.token_ids
        assert len(tokens) == requests.context_lens[0] + 1 and tokens.min() > 0
        self.seen.append((requests.context_lens, requests.forward_depths, runner_of(self)))

    def rehearse(self, requests: Any) -> None:
        self.propose(requests)

    def forget(self, req_ids: list[str]) -> None:
        self.forgotten += req_ids


def runner_of(drafter: _Drafter) -> int:
    return drafter.runner.state.rehearsal_requests  # type: ignore[attr-defined]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "any_failed", bool)
    drafter = _Drafter()
    made = SimpleNamespace(
        drafter=SimpleNamespace(
            drafter=drafter, options=SimpleNamespace(num_nodes=8, tree_width=4)
        ),
        max_model_len=1000,
        synced=0,
    )
    made.state = RunnerState(made)
    made._sync_device = lambda: setattr(made, "synced", made.synced + 1)
    drafter.runner = made  # type: ignore[attr-defined]
    return made


def test_warm_up_drafts_every_depth(runner: Any) -> None:
    warm_up_draft(runner.state)
    drafter = runner.drafter.drafter
    depths = (1, 2, 3)
    assert drafter.seen == [([context], [d], 1) for context in (7, 996) for d in depths]
    assert set(drafter.forgotten) == {"specplug-rehearsal-0"}
    assert (runner.state.rehearsal_requests, runner.synced) == (0, 1)


def test_a_method_without_a_forward_has_nothing_to_warm_up(runner: Any) -> None:
    runner.drafter.drafter.rehearsed_depth = 0
    warm_up_draft(runner.state)
    assert not runner.drafter.drafter.seen


def test_a_draft_that_fails_is_forgotten_too(runner: Any) -> None:
    runner.drafter.drafter.propose = lambda requests: 1 // 0
    with pytest.raises(ZeroDivisionError), rehearsal(runner.state, 2, 3) as requests:
        runner.drafter.drafter.propose(requests)
    assert [len(tokens) for tokens in requests.token_ids] == [8, 8]
    assert runner.state.rehearsal_requests == 0
    assert runner.drafter.drafter.forgotten == ["specplug-rehearsal-0", "specplug-rehearsal-1"]


def test_every_way_to_sample_is_warmed_up(runner: Any) -> None:
    """What vLLM's sampler compiles differs by one row or more, and by which limits there are."""
    seen = set()

    def sample(logits: torch.Tensor, sampling_metadata: Any) -> Any:
        assert not sampling_metadata.all_greedy and not sampling_metadata.generators
        limits = (sampling_metadata.top_k is not None, sampling_metadata.top_p is not None)
        seen.add((len(logits), *limits))
        return SimpleNamespace(sampled_token_ids=torch.zeros(len(logits), 1, dtype=torch.int32))

    runner.sampler, runner.max_num_reqs, runner.device = sample, 5, torch.device("cpu")
    runner.dtype, runner.model_config = torch.float32, SimpleNamespace(get_vocab_size=lambda: 50)
    warm_up_sampling(runner.state)
    ways = [(k, p) for k in (True, False) for p in (True, False)]
    assert seen == {(rows, k, p) for rows in (1, 2, 5, 256) for k, p in ways}


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_warm_before_vllm_watches_what_compiles(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """vLLM raises on a late compilation with --jit-monitor-mode=error; and it has seeded by then,
    so its generators must not move."""
    from vllm_specplug.vllm_v1 import worker_gpu

    done: list[str] = []
    runner = SimpleNamespace(state=None, start_budget=lambda: done.append("budget"))

    def draft(given: Any) -> None:
        if fails:
            raise RuntimeError("cannot draft")
        done.append("draft")

    monkeypatch.setattr(worker_gpu, "warm_up_draft", draft)
    monkeypatch.setattr(
        worker_gpu, "warm_up_sampling", lambda given: done.append(f"sample {torch.rand(()) >= 0}")
    )
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
    assert done == ["sample True", "draft", "budget", "monitor"]
    assert torch.equal(torch.get_rng_state(), before)
