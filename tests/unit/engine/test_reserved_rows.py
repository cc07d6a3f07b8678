# SPDX-License-Identifier: Apache-2.0
"""A scheduler that works ahead reserves what its worker asked for."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import ModelRunnerOutput

from vllm_specplug.drafting.reserved_rows import RESERVED_ROWS_ATTRIBUTE, ReservedRows
from vllm_specplug.engine import draft_counts
from vllm_specplug.engine.metrics_bridge import wrap_update_from_output
from vllm_specplug.metrics import TREE_NODES_ATTRIBUTE

PLACEHOLDERS = [-1] * 6


def _scheduler(**drafts: list[int]) -> Any:
    running = [SimpleNamespace(request_id=n, spec_token_ids=d) for n, d in drafts.items()]
    return SimpleNamespace(running=running)


def _reserved(scheduler: Any, reserved: ReservedRows | None) -> dict[str, int]:
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    if reserved is not None:
        setattr(output, RESERVED_ROWS_ATTRIBUTE, reserved)
    # As it comes from a worker's process.
    output = pickle.loads(pickle.dumps(output))
    wrap_update_from_output(lambda *args: {})(scheduler, None, output)
    return {request.request_id: len(request.spec_token_ids) for request in scheduler.running}


def test_each_request_keeps_what_it_was_given() -> None:
    scheduler = _scheduler(a=PLACEHOLDERS, b=PLACEHOLDERS, c=PLACEHOLDERS, late=PLACEHOLDERS, d=[])
    wanted = ReservedRows.of({"a": 0, "b": 2, "c": 9, "d": 4, "ended": 1})
    assert _reserved(scheduler, wanted) == {"a": 0, "b": 2, "c": 6, "late": 4, "d": 0}
    # vLLM shares one list between all requests.
    assert len(PLACEHOLDERS) == 6


def test_without_a_wish_nothing_is_taken_back() -> None:
    assert _reserved(_scheduler(a=PLACEHOLDERS), None) == {"a": 6}


def test_requests_that_begin_get_what_the_others_get() -> None:
    assert ReservedRows.of({}).nodes("new") == 0
    assert ReservedRows.of({"a": 0, "b": 0}).nodes("new") == 0
    assert ReservedRows.of({"a": 0, "b": 3}).nodes("new") == 2


def test_requests_that_ended_are_not_kept() -> None:
    wanted = ReservedRows.of({"a": 0, "b": 3, "c": 6})
    assert wanted.without(["b", "new"]) == ReservedRows({"a": 0, "c": 6}, 3)


def _counted(
    nodes: dict[str, int] | None, invalid: dict[str, int] | None = None
) -> dict[str, int] | None:
    """Invalid drafts as vLLM counts them, of three requests with six reserved rows each."""
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    if nodes is not None:
        setattr(output, TREE_NODES_ATTRIBUTE, nodes)
    step = SimpleNamespace(
        scheduled_spec_decode_tokens=dict.fromkeys("abc", PLACEHOLDERS),
        num_invalid_spec_tokens=invalid,
    )
    wrap_update_from_output(lambda *args: {})(_scheduler(), step, output)
    return step.num_invalid_spec_tokens


def test_rows_without_a_node_are_no_drafts() -> None:
    assert _counted({"a": 6, "b": 2}) == {"a": 0, "b": 4, "c": 6}
    # Of the rows that a grammar forbids, some have no node.
    assert _counted({"a": 6, "b": 2, "c": 4}, {"b": 5, "c": 1}) == {"a": 0, "b": 5, "c": 2}
    assert _counted(None) is None


def test_a_draft_without_nodes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_counts, "tree_config", lambda config: config)
    scheduler = SimpleNamespace(vllm_config=object(), num_spec_tokens=6, log_stats=True)
    make = draft_counts.wrap_make_spec_decoding_stats(Scheduler.make_spec_decoding_stats)

    def stats_of(before: Any, invalid: dict[str, int] | None) -> Any:
        return make(
            scheduler, before, num_draft_tokens=6, num_accepted_tokens=0,
            num_invalid_spec_tokens=invalid, request_id="a",
        )  # fmt: skip

    assert stats_of(None, {"a": 6}) is None
    first = stats_of(None, {"a": 2, "b": 6})
    assert (first.num_drafts, first.num_draft_tokens) == (1, 4)
    assert stats_of(first, {"a": 6}) is first and first.num_drafts == 1
    assert stats_of(first, None).num_draft_tokens == 10
    # Methods of vLLM's own count as before.
    scheduler.vllm_config = None
    assert stats_of(first, {"a": 6}).num_drafts == 3

    request = SimpleNamespace(spec_decode_metrics=RequestSpecDecodeMetrics.new(6))
    scheduler.vllm_config = object()
    draft_counts.wrap_add_request(lambda *args: None)(scheduler, request)
    request.spec_decode_metrics.observe(num_draft_tokens=0, num_accepted=0, detailed=True)
    request.spec_decode_metrics.observe(num_draft_tokens=4, num_accepted=3, detailed=True)
    found = request.spec_decode_metrics.to_dict()
    assert found["num_spec_steps"] == 1 and found["mean_acceptance_length"] == 4
    assert (found["per_step_drafted"], found["per_step_accepted"]) == ([4], [3])
