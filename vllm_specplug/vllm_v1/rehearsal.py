# SPDX-License-Identifier: Apache-2.0
"""Draft forwards before there are requests: to compile what they compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_specplug.drafting.drafter import DraftRequests

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter


SHORT_CONTEXT = 7
# Long enough for a kernel to split it.
LONG_CONTEXT = 8192


@contextmanager
def rehearsal(
    runner: Any, count: int, depth: int, context: int = SHORT_CONTEXT
) -> Iterator[DraftRequests]:
    """`count` dummy requests of `context` tokens and an anchor, to draft `depth` levels for."""
    tokens = 1 + np.arange(context + 1) % 7  # ids that the smallest vocabularies have
    options = runner.drafter.options
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
    runner.rehearsal_requests = count
    try:
        yield requests
    finally:
        runner.rehearsal_requests = 0
        runner.drafter.drafter.forget(requests.req_ids)


def warm_up_draft(runner: Any) -> None:
    """Drafts every depth once after a short and a long context, so that what a draft forward
    compiles is compiled before serving."""
    drafter: Drafter = runner.drafter.drafter
    deepest = drafter.forward_depth
    longest = min(LONG_CONTEXT, runner.max_model_len - deepest - 1)
    for context in (SHORT_CONTEXT, longest) if longest > SHORT_CONTEXT else (SHORT_CONTEXT,):
        for depth in range(1, deepest + 1):
            with rehearsal(runner, 1, depth, context) as requests:
                drafter.propose(requests)
    runner._sync_device()
