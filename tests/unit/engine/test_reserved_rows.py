# SPDX-License-Identifier: Apache-2.0
"""A scheduler that works ahead reserves what its worker asked for."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.drafting.step_report import REPORT_ATTRIBUTE, StepReport
from vllm_specplug.engine.step_reports import wrap_update_from_output

PLACEHOLDERS = [-1] * 6


def _scheduler(**drafts: list[int]) -> Any:
    running = [SimpleNamespace(request_id=n, spec_token_ids=d) for n, d in drafts.items()]
    return SimpleNamespace(running=running)


def _reserved(scheduler: Any, reserved: ReservedRows | None) -> dict[str, int]:
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    if reserved is not None:
        setattr(output, REPORT_ATTRIBUTE, StepReport(None, reserved))
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
