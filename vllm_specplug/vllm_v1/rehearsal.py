# SPDX-License-Identifier: Apache-2.0
"""Samples before there are requests: to compile what they compile, and to take the memory they take
while vLLM measures it."""

from __future__ import annotations

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_specplug.vllm_v1.runner_state import RunnerState
from vllm_specplug.vllm_v1.target_sampler import MAX_ELEMENTS_AT_ONCE, TargetSampler

_FEW_ROWS = 256


def warm_up_sampling(state: RunnerState, logits: torch.Tensor | None = None) -> None:
    """Samples rows in each way that a walk may, so that what vLLM's sampler compiles is compiled.

    Args:
        logits: [rows, V] of the largest walk; edited. A few rows if not given.
    """
    if logits is None:
        logits = torch.zeros((_FEW_ROWS, state.vocab_size), dtype=state.dtype, device=state.device)
    most = max(1, MAX_ELEMENTS_AT_ONCE // logits.shape[1])
    for rows in sorted({1, 2, min(len(logits), state.max_requests), min(len(logits), most)}):
        for top_k, top_p in ((True, True), (True, False), (False, True), (False, False)):
            sampler = TargetSampler(
                state.sampler,
                logits[:rows],
                _dummy_sampling(rows, logits, top_k, top_p),
                [[] for _ in range(rows)],
                set(),
                at_once=True,
            )
            sampler.walk([None] * rows, list(range(rows)))


def _dummy_sampling(rows: int, logits: torch.Tensor, top_k: bool, top_p: bool) -> SamplingMetadata:
    """Random sampling of `rows` requests without any state."""

    def filled(value: float) -> torch.Tensor:
        return torch.full((rows,), value, device=logits.device)

    return SamplingMetadata(
        temperature=filled(0.5),
        all_greedy=False,
        all_random=False,
        top_p=filled(0.9) if top_p else None,
        top_k=filled(logits.shape[1] - 1).int() if top_k else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=filled(0.0),
        presence_penalties=filled(0.0),
        repetition_penalties=filled(1.0),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
