# SPDX-License-Identifier: Apache-2.0
"""Drafting for requests that do not exist leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_specplug.vllm_v1.rehearsal import rehearsal, warm_up_draft


class _Drafter:
    forward_depth = 3

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int], int]] = []
        self.forgotten: list[str] = []

    def propose(self, requests: Any) -> None:
        (tokens,) = requests.token_ids
        assert len(tokens) == requests.context_lens[0] + 1 and tokens.min() > 0
        self.seen.append((requests.context_lens, requests.forward_depths, runner_of(self)))

    def forget(self, req_ids: list[str]) -> None:
        self.forgotten += req_ids


def runner_of(drafter: _Drafter) -> int:
    return drafter.runner.rehearsal_requests  # type: ignore[attr-defined]


@pytest.fixture
def runner() -> Any:
    drafter = _Drafter()
    made = SimpleNamespace(
        drafter=SimpleNamespace(
            drafter=drafter, options=SimpleNamespace(num_nodes=8, tree_width=4)
        ),
        max_model_len=1000,
        rehearsal_requests=0,
        synced=0,
    )
    made._sync_device = lambda: setattr(made, "synced", made.synced + 1)
    drafter.runner = made  # type: ignore[attr-defined]
    return made


def test_warm_up_drafts_every_depth(runner: Any) -> None:
    warm_up_draft(runner)
    drafter = runner.drafter.drafter
    depths = (1, 2, 3)
    assert drafter.seen == [([context], [d], 1) for context in (7, 996) for d in depths]
    assert set(drafter.forgotten) == {"specplug-rehearsal-0"}
    assert (runner.rehearsal_requests, runner.synced) == (0, 1)


def test_a_method_without_a_forward_has_nothing_to_warm_up(runner: Any) -> None:
    runner.drafter.drafter.forward_depth = 0
    warm_up_draft(runner)
    assert not runner.drafter.drafter.seen


def test_a_draft_that_fails_is_forgotten_too(runner: Any) -> None:
    runner.drafter.drafter.propose = lambda requests: 1 // 0
    with pytest.raises(ZeroDivisionError), rehearsal(runner, 2, 3) as requests:
        runner.drafter.drafter.propose(requests)
    assert [len(tokens) for tokens in requests.token_ids] == [8, 8]
    assert runner.rehearsal_requests == 0
    assert runner.drafter.drafter.forgotten == ["specplug-rehearsal-0", "specplug-rehearsal-1"]
