# SPDX-License-Identifier: Apache-2.0
"""Which requests follow a grammar: the scheduler's view, through sessions and reused names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_specplug.vllm_worker.constrained import ConstrainedRequests


def step(*new: tuple[str, bool], finished: tuple[str, ...] = ()) -> Any:
    requests = [
        SimpleNamespace(
            req_id=name,
            sampling_params=SimpleNamespace(structured_outputs=object() if grammar else None),
        )
        for name, grammar in new
    ]
    return SimpleNamespace(finished_req_ids=set(finished), scheduled_new_reqs=requests)


def test_a_name_is_constrained_from_its_first_turn_to_its_end() -> None:
    constrained = ConstrainedRequests()
    constrained.update(step(("session", True), ("free", False)))
    constrained.update(step(("session", False)))
    assert "session" in constrained and "free" not in constrained
    constrained.update(step(finished=("session",)))
    assert "session" not in constrained


def test_an_ended_name_that_comes_back_at_once_is_another_request() -> None:
    constrained = ConstrainedRequests()
    constrained.update(step(("a", True), ("b", False)))
    constrained.update(step(("a", False), ("b", True), finished=("a", "b")))
    assert "a" not in constrained and "b" in constrained


def test_pooling_requests_have_no_sampling_parameters() -> None:
    constrained = ConstrainedRequests()
    request = SimpleNamespace(req_id="p", sampling_params=None)
    constrained.update(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[request]))
    assert "p" not in constrained
