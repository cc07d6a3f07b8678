# SPDX-License-Identifier: Apache-2.0
"""Draft forwards and samples before there are requests: to compile what they compile, and to take
the memory they take while vLLM measures it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_specplug.drafting.drafter import CommittedTokens, DraftRequests
from vllm_specplug.registry import headless_methods
from vllm_specplug.vllm_v1.runner_state import RunnerState
from vllm_specplug.vllm_v1.target_sampler import MAX_ELEMENTS_AT_ONCE, TargetSampler
from vllm_specplug.vllm_worker.ranks import any_failed
from vllm_specplug.vllm_worker.rehearsal import SHORT_CONTEXT, rehearsal

# Long enough for a kernel to split it.
LONG_CONTEXT = 8192
_FEW_ROWS = 256


def warm_up_draft(state: RunnerState) -> None:
    """Drafts every depth once after a short and a long context, so that what a draft forward
    compiles is compiled before serving.

    Raises:
        RuntimeError: on every worker, when drafting failed on any.
    """
    failure: Exception | None = None
    try:
        _draft_every_depth(state)
        state.wait_for_device()
    except Exception as error:
        failure = error
    # What comes next is done together.
    if any_failed(failure):
        reason = "another worker could not; its log says why"
        if failure is not None:
            reason = f"{type(failure).__name__}: {failure}"
        raise RuntimeError(
            f"The draft head cannot draft on this device: {reason}. It would fail while serving; "
            f"use another head, or a method without one: {', '.join(headless_methods())}."
        ) from failure


def _draft_every_depth(state: RunnerState) -> None:
    deepest = state.drafter.forward_depth
    longest = min(LONG_CONTEXT, state.max_model_len - deepest - 1)
    for context in (SHORT_CONTEXT, longest) if longest > SHORT_CONTEXT else (SHORT_CONTEXT,):
        for depth in range(1, deepest + 1):
            with rehearsal(state, 1, depth, context) as requests:
                state.drafter.propose(requests)


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


class _NoCache:
    """A `DraftCache` before there are pages: takes what a real one would take for a moment."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        pass

    def block_attention(self, requests: DraftRequests, rows: int, causal: Any) -> Any:
        return lambda layer, query, key, value: torch.zeros_like(
            query, memory_format=torch.contiguous_format
        )


@torch.inference_mode()
def profile_largest_step(state: RunnerState, max_step_rows: int) -> None:
    """Allocates at once what the largest step with trees needs beside the target's forward, for
    vLLM's memory profile: logits of all rows, their samples, and a draft for every request.

    The hidden states stay for the draft, and vLLM holds the logits until the step is over.

    Args:
        max_step_rows: most rows with logits of one step.
    """
    options = state.vllm_config.speculative_config
    tokens, num_reqs, device = state.max_rows, state.max_requests, state.device
    drafter = state.drafter
    hidden = torch.zeros((tokens, state.hidden_size), dtype=state.dtype, device=device)
    aux = [torch.zeros_like(hidden) for _ in options.aux_layers or ()]
    rows = min(num_reqs * (1 + options.num_speculative_tokens), max_step_rows)
    sample_hidden = hidden[:rows].clone()
    logits = state.logits(sample_hidden)
    warm_up_sampling(state, logits)
    if not drafter.forward_depth:
        return
    drafter.bind_cache(_NoCache())
    every = torch.arange(tokens, device=device)
    drafter.observe(CommittedTokens(aux, every, every % state.max_model_len, every))
    with rehearsal(state, num_reqs, drafter.forward_depth) as requests:
        drafter.propose(requests)
