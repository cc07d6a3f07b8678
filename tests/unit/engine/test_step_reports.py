# SPDX-License-Identifier: Apache-2.0
"""Drafts come with a step's output, without another call."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_specplug.drafting.step_report import REPORT_ATTRIBUTE, StepReport
from vllm_specplug.engine import step_reports


def test_the_scheduler_gets_the_drafts_after_the_tokens() -> None:
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    drafts = DraftTokenIds(["a"], [[5, 6]])
    setattr(output, REPORT_ATTRIBUTE, StepReport(None, None, drafts))
    scheduler = Mock()
    step_reports.wrap_update_from_output(lambda scheduler, *_: scheduler.update())(
        scheduler, None, pickle.loads(pickle.dumps(output))
    )
    assert [name for name, *_ in scheduler.method_calls] == ["update", "update_draft_token_ids"]
    assert scheduler.update_draft_token_ids.call_args.args == (drafts,)


@pytest.mark.parametrize("is_tree", [False, True])
def test_workers_are_asked_for_drafts_without_trees_only(is_tree: bool) -> None:
    core: Any = SimpleNamespace(
        vllm_config=None,
        check_for_draft_tokens=True,
        async_scheduling=False,
        model_executor=Mock(),
        scheduler=Mock(),
    )
    stock = getattr(EngineCore.post_step, "__wrapped__", EngineCore.post_step)
    with patch.object(step_reports, "tree_config", lambda _: "tree" if is_tree else None):
        step_reports.wrap_post_step(stock)(core, True)
    assert core.model_executor.take_draft_token_ids.called is not is_tree
    assert core.scheduler.update_draft_token_ids.called is not is_tree
