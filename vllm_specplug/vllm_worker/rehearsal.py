# SPDX-License-Identifier: Apache-2.0
"""Draft forwards before there are requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vllm_specplug.drafting.drafter import DrafterOptions, DraftRequests

if TYPE_CHECKING:
    from vllm_specplug.drafting.drafter import Drafter

SHORT_CONTEXT = 7


class DraftingRunner(Protocol):
    """What a draft forward without requests needs of a runner."""

    rehearsal_requests: int
    """Rows of the block table that such a forward may read."""

    @property
    def drafter(self) -> Drafter: ...

    @property
    def drafter_options(self) -> DrafterOptions: ...


@contextmanager
def rehearsal(
    runner: DraftingRunner, count: int, depth: int, context: int = SHORT_CONTEXT
) -> Iterator[DraftRequests]:
    """`count` dummy requests of `context` tokens and an anchor, to draft `depth` levels for."""
    tokens = 1 + np.arange(context + 1) % 7  # ids that the smallest vocabularies have
    options = runner.drafter_options
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
        runner.drafter.forget(requests.req_ids)
