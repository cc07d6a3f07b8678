# SPDX-License-Identifier: Apache-2.0
"""Requests that decode without drafts, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams

from vllm_specplug.vllm_v2.runner import _plain_reason, _stop_tokens
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
