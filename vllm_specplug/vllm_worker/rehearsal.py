# SPDX-License-Identifier: Apache-2.0
"""Draft forwards before there are requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from vllm_specplug.drafting.drafter import DraftRequests
from vllm_specplug.vllm_worker.runner_view import RunnerView

SHORT_CONTEXT = 7


@contextmanager
def rehearsal(
    state: RunnerView, count: int, depth: int, context: int = SHORT_CONTEXT
) -> Iterator[DraftRequests]:
    """`count` dummy requests of `context` tokens and an anchor, to draft `depth` levels for."""
    tokens = 1 + np.arange(context + 1) % 7  # ids that the smallest vocabularies have
    options = state.drafter_options
    requests = DraftRequests(
        req_ids=[f"specplug-rehearsal-{i}" for i in range(count)],
        token_ids=[tokens] * count,
        context_lens=[len(tokens) - 1] * count,
        req_indices=list(range(count)),
        budgets=[options.num_nodes] * count,
        widths=[options.tree_width] * count,
        depths=[depth] * count,
        forward_depths=[depth] * count,
    )
    state.rehearsal_requests = count
    try:
        yield requests
    finally:
        state.rehearsal_requests = 0
        state.drafter.forget(requests.req_ids)
