# SPDX-License-Identifier: Apache-2.0
"""Gives the scheduler what a worker added to a step's output.

Seam: step_reports.

Unless it schedules ahead, vLLM asks the worker for its drafts in a call after each step. While the
engine core waits for the answer, the API server may take its CPU, and the worker idles longer.
Drafts that come with the output make the call unnecessary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_specplug.drafting.step_report import REPORT_ATTRIBUTE, StepReport
from vllm_specplug.engine.draft_counts import exclude_unused_rows
from vllm_specplug.engine.metrics_bridge import attach_stats
from vllm_specplug.engine.placeholders import keep_reserved_rows
from vllm_specplug.engine.spec_config import tree_config


def wrap_update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Scheduler.update_from_output`, which also takes the worker's report."""

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        report: StepReport | None = getattr(model_runner_output, REPORT_ATTRIBUTE, None)
        if report is None:
            return original(self, scheduler_output, model_runner_output)
        if report.tree_nodes is not None:
            exclude_unused_rows(scheduler_output, report.tree_nodes)
        outputs = original(self, scheduler_output, model_runner_output)
        if report.reserved is not None:
            keep_reserved_rows(self, report.reserved)
        if report.drafts is not None:
            self.update_draft_token_ids(report.drafts)
        if report.stats is not None:
            attach_stats(outputs, report.stats)
        return outputs

    return update_from_output


def wrap_post_step(original: Callable[..., None]) -> Callable[..., None]:
    """`EngineCore.post_step`, which does not ask a tree method's workers for drafts."""

    def post_step(self: Any, model_executed: bool) -> None:
        if tree_config(self.vllm_config) is None:
            original(self, model_executed)

    return post_step
