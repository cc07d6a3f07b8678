# SPDX-License-Identifier: Apache-2.0
"""A thinking budget ends with its request, whoever takes the slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_specplug.vllm_v1.runner_state import RunnerState

THINK, END = 7, 8


def _runner(*budgets: int | None) -> Any:
    """A runner whose batch has a thinking request of each budget."""
    reasoning: Any = SimpleNamespace(
        reasoning_start_token_ids=[THINK], reasoning_end_token_ids=[END]
    )
    batch = InputBatch(
        max_num_reqs=len(budgets), max_model_len=64, max_num_batched_tokens=64,
        device=torch.device("cpu"), vocab_size=16, block_sizes=[16], max_num_blocks_per_req=[4],
        reasoning_config=reasoning,
    )  # fmt: skip
    requests = {}
    for i, budget in enumerate(budgets):
        request = CachedRequestState(
            req_id=f"r{i}", prompt_token_ids=[1, THINK], mm_features=[], generator=None,
            sampling_params=SamplingParams(thinking_token_budget=budget), block_ids=([],),
            num_computed_tokens=0, output_token_ids=[],
        )  # fmt: skip
        requests[request.req_id] = request
        batch.add_request(request)
    batch.refresh_metadata()
    return SimpleNamespace(input_batch=batch, requests=requests)


def _end(runner: Any, *req_ids: str) -> dict[str, int]:
    """Ends requests as vLLM does; the budgets that it goes on to apply, by request."""
    batch = runner.input_batch
    for req_id in req_ids:
        batch.remove_request(req_id)
        del runner.requests[req_id]
    batch.condense()
    batch.refresh_metadata()
    RunnerState(runner).drop_stale_thinking_budgets()
    states = batch.thinking_budget_state_holder._state
    return {batch.req_ids[i]: state["thinking_token_budget"] for i, state in states.items()}


def test_a_request_without_a_budget_moves_into_the_slot_of_one_that_had_one() -> None:
    assert _end(_runner(3, None), "r0") == {}


def test_the_other_requests_keep_theirs() -> None:
    assert _end(_runner(3, 4, 5, None, 6), "r0", "r1") == {"r2": 5, "r4": 6}
    assert _end(_runner(3, None, 5), "r1") == {"r0": 3, "r2": 5}
    assert _end(_runner(3, None, 5), "r2") == {"r0": 3}


def test_nothing_is_dropped_where_no_budget_ends() -> None:
    assert _end(_runner(3, None, 5)) == {"r0": 3, "r2": 5}
