# SPDX-License-Identifier: Apache-2.0
"""Requests that decode without drafts, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams

from tests.unit.vllm_worker.planning import MAX_NODES, planner_of
from vllm_specplug.vllm_v2.runner import _plain_reason, _stop_tokens
from vllm_specplug.vllm_v2.speculator import TreeSpeculator
from vllm_specplug.vllm_v2.step_input import HostBatch
from vllm_specplug.vllm_v2.stop_tokens import MAX_STOP_TOKENS

LOOPS = RepetitionDetectionParams(max_pattern_size=4, min_count=3)


@pytest.mark.parametrize(
    ("params", "embeds", "reason"),
    [
        (SamplingParams(), None, None),
        # No row of vLLM's tokens holds such a prompt.
        (SamplingParams(), object(), "embeds"),
        (None, None, "no_draft"),
        (SamplingParams(repetition_detection=LOOPS), None, "no_draft"),
        (SamplingParams(stop_token_ids=list(range(MAX_STOP_TOKENS))), None, None),
        (SamplingParams(stop_token_ids=list(range(MAX_STOP_TOKENS + 1))), None, "no_draft"),
    ],
)
def test_why_a_request_has_no_drafts(params: Any, embeds: Any, reason: str | None) -> None:
    request = SimpleNamespace(sampling_params=params, prompt_embeds=embeds)
    assert _plain_reason(request, _stop_tokens(request)) == reason


def test_others_beside_it_are_drafted_for() -> None:
    planner, made = planner_of(), object.__new__(TreeSpeculator)
    made.__dict__.update(
        planner=planner, stats=planner.stats, plain={"a": "embeds"}, penalties={}, extra_args={},
        proposer=SimpleNamespace(options=SimpleNamespace(tree_width=4)),
        store=SimpleNamespace(vocab_size=100), max_model_len=512, max_num_tokens=512,
    )  # fmt: skip
    two = np.ones(2, np.int32)
    batch = HostBatch("ab", [np.ones(16, np.int32)] * 2, 11 * two, 512 * two, 10 * two, two)
    requests, others = made._draft_requests(batch, MAX_NODES)
    assert (requests.req_ids, requests.req_indices) == (["b"], [1])
    assert others.num_roots == 2
    assert made.stats.plain_steps == {"embeds": 1}
