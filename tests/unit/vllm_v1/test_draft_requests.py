# SPDX-License-Identifier: Apache-2.0
"""Who is drafted for: only requests whose row of vLLM's batch holds their own text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_specplug.budget import RowBudget
from vllm_specplug.metrics import StepStats
from vllm_specplug.vllm_v1.runner import TreeRunnerMixin
from vllm_specplug.vllm_worker.draft_planner import DraftPlanner

STRANGER = [60, 61, 62, 63, 60, 61, 62, 63]


def _batch() -> InputBatch:
    return InputBatch(
        max_num_reqs=2,
        max_model_len=64,
        max_num_batched_tokens=64,
        device=torch.device("cpu"),
        vocab_size=100,
        block_sizes=[16],
        max_num_blocks_per_req=[4],
    )


def _request(req_id: str, **prompt: Any) -> CachedRequestState:
    return CachedRequestState(
        req_id=req_id,
        mm_features=[],
        sampling_params=SamplingParams(max_tokens=20),
        generator=None,
        block_ids=([1],),
        num_computed_tokens=0,
        output_token_ids=[5],
        **{"prompt_token_ids": None, **prompt},
    )


def _drafted_for(second: CachedRequestState) -> tuple[list[list[int]], dict[str, int]]:
    """Token ids that a drafter sees once `second` has taken the row of a request of tokens."""
    batch = _batch()
    batch.add_request(_request("first", prompt_token_ids=STRANGER))
    batch.remove_request("first")
    batch.add_request(second)
    stats = StepStats()
    options = SimpleNamespace(
        num_speculative_tokens=8, tree_budget=8, max_draft_context=None, max_request_budget=None
    )
    runner: Any = object.__new__(TreeRunnerMixin)
    runner.input_batch, runner.requests = batch, {second.req_id: second}
    runner.enable_prompt_embeds = True
    runner.max_model_len = runner.max_num_tokens = 64
    runner.planner = DraftPlanner(options, RowBudget(8, 64), stats, vocab_size=100)
    runner.tree_metrics = SimpleNamespace(stats=stats)
    runner.drafter = SimpleNamespace(options=SimpleNamespace(tree_width=4))
    requests, _ = runner._draft_requests([[5]])
    return [ids.tolist() for ids in requests.token_ids], stats.plain_steps


@pytest.mark.parametrize("mixed", [False, True])
def test_what_lies_under_embeddings_is_nobodys_text(mixed: bool) -> None:
    prompt: dict[str, Any] = {"prompt_embeds": torch.zeros(len(STRANGER), 4)}
    if mixed:
        prompt["prompt_token_ids"] = [0] * 4 + [7] * 4
        prompt["prompt_is_token_ids"] = [False] * 4 + [True] * 4
    seen, plain = _drafted_for(_request("second", **prompt))
    assert not seen, seen
    assert plain == {"embeds": 1}


def test_requests_of_tokens_are_drafted_for_beside_the_option() -> None:
    seen, plain = _drafted_for(_request("second", prompt_token_ids=[7, 8]))
    assert seen == [[7, 8, 5]] and not plain
