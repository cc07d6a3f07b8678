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
    """One that ended and comes back at once is another request."""
    constrained = ConstrainedRequests()
    constrained.update(step(("session", True), ("free", False)))
    constrained.update(step(("session", False)))
    assert "session" in constrained and "free" not in constrained
    constrained.update(step(("session", False), ("free", True), finished=("session", "free")))
    assert "session" not in constrained and "free" in constrained
    constrained.update(step(finished=("free",)))
    assert "free" not in constrained


def test_pooling_requests_have_no_sampling_parameters() -> None:
    constrained = ConstrainedRequests()
    request = SimpleNamespace(req_id="p", sampling_params=None)
    constrained.update(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[request]))
    assert "p" not in constrained
