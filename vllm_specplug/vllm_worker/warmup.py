# SPDX-License-Identifier: Apache-2.0
"""Draft forwards before the first request: they compile kernels, and take their memory while vLLM
measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.caches import TargetCacheSpec, WindowSpec, WindowTokens
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.registry import headless_methods
from vllm_specplug.vllm_worker.memory.rank_caches import bind_target_caches
from vllm_specplug.vllm_worker.ranks import any_failed
from vllm_specplug.vllm_worker.runner_view import RunnerView

DUMMY_NAME = "specplug-warmup"
SHORT_CONTEXT = 7
# Long enough for kernels to split it.
LONG_CONTEXT = 8192


@contextmanager
def dummy_requests(
    state: RunnerView,
    count: int,
    depth: int,
    context: int = SHORT_CONTEXT,
    nodes: int | None = None,
) -> Iterator[DraftRequests | DeviceRequests]:
    """Yields `count` dummy requests of `context` tokens and an anchor, for drafts of `depth` levels
    and at most `nodes` nodes, where steps draft: on the host or on the device."""
    options = state.drafter_options
    tokens = 1 + np.arange(context + 1) % 7  # ids that the smallest vocabularies have
    requests = DraftRequests(
        req_ids=[f"{DUMMY_NAME}-{i}" for i in range(count)],
        # Rows of equal tokens would all take the same experts.
        token_ids=[(tokens + 7 * i) % options.vocab_size for i in range(count)],
        context_lens=[context] * count,
        req_indices=list(range(count)),
        budgets=[min(nodes or options.num_nodes, options.num_nodes)] * count,
        width=options.tree_width,
        depths=[depth] * count,
        forward_depths=[depth] * count,
    )
    try:
        if state.drafts_on_device:
            yield DeviceRequests.of(requests, options.num_nodes, state.device)
        else:
            yield requests
    finally:
        state.drafter.forget(requests.req_ids)


def warm_up_draft(state: RunnerView) -> None:
    """Drafts every depth once after a short and a long context, to compile all kernels of a draft
    before serving.

    Raises:
        RuntimeError: on every worker, when drafting failed on any.
    """
    failure: Exception | None = None
    try:
        _draft_every_depth(state)
        state.wait_for_device()
    except Exception as error:
        failure = error
    # All workers run the next stage together.
    if any_failed(failure):
        reason = "another worker could not; its log says why"
        if failure is not None:
            reason = f"{type(failure).__name__}: {failure}"
        raise RuntimeError(
            f"The draft head cannot draft on this device: {reason}. It would fail while serving; "
            f"use another head, or a method without one: {', '.join(headless_methods())}."
        ) from failure


def _draft_every_depth(state: RunnerView) -> None:
    if state.drafter.attends_context and state.drafts_on_device:
        for tokens in (1, state.max_rows):
            _observe(state, *_dummy_states(state, tokens), has_slots=False)
    deepest = state.drafter.warmup_depth
    longest = min(LONG_CONTEXT, state.max_model_len - deepest - 1)
    for context in (SHORT_CONTEXT, longest) if longest > SHORT_CONTEXT else (SHORT_CONTEXT,):
        for depth in range(1, deepest + 1):
            with dummy_requests(state, 1, depth, context) as requests:
                state.drafter.warmup(requests)


def _dummy_states(state: RunnerView, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the target's output [tokens, H] and its outputs at the drafter's layers."""
    shape = (tokens, state.hidden_size)
    hidden = torch.zeros(shape, dtype=state.dtype, device=state.device)
    layers = state.vllm_config.speculative_config.aux_layers or ()
    return hidden, [torch.zeros_like(hidden) for _ in layers]


def _observe(
    state: RunnerView, hidden: torch.Tensor, aux: list[torch.Tensor], has_slots: bool
) -> None:
    """Shows the drafter dummy tokens; without slots their context is not stored."""
    every = torch.arange(len(hidden), device=state.device)
    slots = every if has_slots else torch.full_like(every, -1)
    positions = every % state.max_model_len
    table_rows = torch.zeros_like(every, dtype=torch.int32)
    state.drafter.observe(
        CommittedTokens(aux, every, positions, slots, output_states=hidden, table_rows=table_rows)
    )


class _NoCache:
    """A `DraftCache` before there are pages. It allocates a real cache's temporary memory."""

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, first_layer: int = 0
    ) -> None:
        pass

    def context_attention(self, table_rows: Any, positions: Any, slots: Any) -> Any:
        return self.block_attention(table_rows, 0, causal=True)

    def block_attention(self, requests: Any, rows: int, causal: Any) -> Any:
        return lambda layer, query, key, value: torch.zeros_like(
            query, memory_format=torch.contiguous_format
        )

    def tree_attention(self, requests: Any, context_lens: Any, parents: Any) -> Any:
        return self.block_attention(requests, 0, causal=True)


class _NoTargetCache:
    """A `TargetCache` before there are pages. It allocates a real one's temporary memory."""

    def __init__(self, spec: TargetCacheSpec) -> None:
        self.spec = spec

    def level_attention(self, requests: Any, context_lens: Any, owners: Any) -> Any:
        # A key and a value of each row, kept for the other layers.
        own: dict[int, torch.Tensor] = {}

        def attend(query: torch.Tensor) -> torch.Tensor:
            rows = len(query)
            if rows not in own:
                own[rows] = query.new_empty(2, rows, self.spec.num_kv_heads, self.spec.head_dim)
            output = torch.zeros_like(query)
            return output.clone()

        return attend


class _NoWindow(_NoCache):
    """`_NoCache` as a `DraftWindow` for new requests."""

    def __init__(self, state: RunnerView, spec: WindowSpec) -> None:
        count = state.max_requests * min(spec.size, state.max_model_len)
        self.slots = torch.zeros(count, dtype=torch.int64, device=state.device)

    def missing(self, requests: Any) -> WindowTokens:
        return WindowTokens(self.slots, self.slots, self.slots)

    def tree_attention(self, requests: Any, context_lens: Any, parents: Any) -> Any:
        return partial(super().tree_attention(requests, context_lens, parents), 0)

    def forget(self, req_ids: Any) -> None:
        pass


@torch.inference_mode()
def profile_largest_step(
    state: RunnerView, max_step_rows: int, sample: Callable[[torch.Tensor], Any]
) -> None:
    """Allocates what the largest step with trees needs besides the target's forward, for vLLM's
    memory profile: logits of all rows, their samples, and a draft for every request.

    All of it exists at once: the draft reads the hidden states, and vLLM keeps the logits until the
    end of the step.

    Args:
        max_step_rows: maximum rows with logits in a step.
        sample: allocates what sampling from logits [rows, V] takes.
    """
    options = state.vllm_config.speculative_config
    num_reqs, drafter = state.max_requests, state.drafter
    hidden, aux = _dummy_states(state, state.max_rows)
    rows = min(num_reqs * (1 + options.num_speculative_tokens), max_step_rows)
    sample_hidden = hidden[:rows].clone()
    logits = state.logits(sample_hidden)
    sample(logits)
    if not drafter.warmup_depth:
        return
    drafter.bind_cache(_NoCache())
    if (window := drafter.window_spec()) is not None:
        drafter.bind_window(_NoWindow(state, window))
    if specs := drafter.target_cache_specs():
        bind_target_caches(drafter, {spec: _NoTargetCache(spec) for spec in specs})
    _observe(state, hidden, aux, has_slots=True)
    with dummy_requests(state, num_reqs, drafter.warmup_depth) as requests:
        drafter.warmup(requests)
