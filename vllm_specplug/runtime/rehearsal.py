# SPDX-License-Identifier: Apache-2.0
"""Draft forwards before there are requests: to compile what they compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_specplug.drafters.base import DraftRequests

if TYPE_CHECKING:
    from vllm_specplug.drafters.base import Drafter


@contextmanager
def rehearsal(runner: Any, count: int, depth: int) -> Iterator[DraftRequests]:
    """`count` requests of a few tokens that do not exist, to draft `depth` levels for."""
    tokens = np.arange(1, 9)
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
    """Drafts every depth once, so that what a draft forward compiles is compiled before serving."""
    drafter: Drafter = runner.drafter.drafter
    for depth in range(1, drafter.forward_depth + 1):
        with rehearsal(runner, 1, depth) as requests:
            drafter.propose(requests)
    runner._sync_device()
