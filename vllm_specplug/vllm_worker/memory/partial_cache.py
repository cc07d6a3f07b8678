# SPDX-License-Identifier: Apache-2.0
"""Partial caches: a bounded copy of the keys and values that matter of a long context.

Per layer and KV head a cache holds the first `sink` positions and those of the others whose keys
score highest against a query, most important first. Keys carry their rotary positions, and
attention does not care for their order, so the copy is read as a small paged cache of its own.

Tokens committed later replace the tail, the least important entries. When they have reached the
sink, or after `refresh` tokens, the choice is due again (TokenSwift, arXiv 2502.18890, section
3.3).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vllm_specplug.kernels import CpuKvLayout, gather_kv, key_scores
from vllm_specplug.kernels.partial_cache import NEWEST, OLDER

# The newest tokens are always chosen, whatever their score, the newest as the most important one:
# text depends on them most.
RECENT = 32


@dataclass
class PartialContext:
    """One request's part of the pool."""

    region: int
    covered: int = 0
    """Context tokens taken in, chosen or replaced since; 0 before the first choice."""
    tail: int = 0
    """Entry that the next committed token replaces."""


class PartialCache:
    """Partial caches of a bounded number of requests, in all layers.

    Args:
        target_caches: the target's paged caches, one per layer, [num_blocks, Hkv, block, 2 * Dh].
        layout: their layout, which the pool shares.
        budget: tokens kept per request, the sink included.
        sink: first positions of the context that are always kept.
        refresh: committed tokens after which the choice is made again, at most budget - sink.
        max_requests: requests kept at once; the least recently used one is evicted, and
            chosen again if it returns.
    """

    def __init__(
        self,
        target_caches: list[torch.Tensor],
        layout: CpuKvLayout,
        budget: int,
        sink: int,
        refresh: int,
        max_requests: int,
    ) -> None:
        assert 0 <= sink < budget and 1 <= refresh <= budget - sink, (budget, sink, refresh)
        self.target_caches, self.layout = target_caches, layout
        self.budget, self.sink, self.refresh = budget, sink, refresh
        self.blocks_per_request = -(-budget // layout.block_size)
        self.max_requests = max_requests
        shape = list(target_caches[0].shape)
        # A pool for no request still has a page: the layout is measured on one.
        shape[0] = max(1, max_requests * self.blocks_per_request)
        self.caches = [cache.new_zeros(shape) for cache in target_caches]
        self.views = [layout.views(cache) for cache in self.caches]
        self.target_views = [layout.views(cache) for cache in target_caches]
        # int32 [max_requests, blocks_per_request]: the pages of each region
        pages = torch.arange(max_requests * self.blocks_per_request, dtype=torch.int32)
        self.block_table = pages.view(max_requests, self.blocks_per_request)
        # Least recently used first.
        self._contexts: OrderedDict[str, PartialContext] = OrderedDict()
        self._free = list(range(max_requests - 1, -1, -1))

    @property
    def num_bytes(self) -> int:
        """Memory of the pool; it never grows."""
        return sum(cache.numel() * cache.element_size() for cache in self.caches)

    def forget(self, req_ids: Iterable[str]) -> None:
        """Frees the regions of requests that ended or were preempted."""
        for req_id in req_ids:
            context = self._contexts.pop(req_id, None)
            if context is not None:
                self._free.append(context.region)

    def advance(
        self,
        req_id: str,
        context_len: int,
        # int32 [max_blocks], the request's row of the target's block table
        block_row: torch.Tensor,
    ) -> tuple[PartialContext, bool]:
        """Takes in what was committed since the last call.

        Returns:
            The request's context, and whether its entries must be chosen again by `choose`, layer
            by layer. Must not be called for more requests at once than the pool has regions.
        """
        assert context_len > self.budget, (context_len, self.budget)
        context = self._contexts.pop(req_id, None)
        if context is None:
            if not self._free:
                self._free.append(self._contexts.popitem(last=False)[1].region)
            context = PartialContext(self._free.pop())
        self._contexts[req_id] = context
        new = context_len - context.covered
        replaced = self.budget - 1 - context.tail
        if not context.covered or new < 0 or replaced + new > self.refresh:
            context.covered, context.tail = context_len, self.budget - 1
            return context, True
        if new:
            positions = torch.arange(context.covered, context_len)
            gather_kv(
                self.target_caches,
                self.caches,
                self._slots(positions, block_row)[None, None],
                self._first_slot(context) + context.tail - torch.arange(new),
                self.layout,
            )
            context.covered, context.tail = context_len, context.tail - new
        return context, False

    def choose(
        self,
        layer: int,
        context: PartialContext,
        # [Hq, Dh], rotated, of the token that follows the context
        query: torch.Tensor,
        block_row: torch.Tensor,
    ) -> torch.Tensor:
        """Fills one layer's entries with the sink and the most important positions.

        Returns:
            The positions, int64 [Hkv, budget]: the sink, then by falling importance.
        """
        length, sink = context.covered, self.sink
        blocks = block_row[: -(-length // self.layout.block_size)]
        scores = key_scores(query, self.target_views[layer][0], blocks, self.layout)
        scores = scores[:, sink:length]
        recent = min(RECENT, self.budget - sink)
        ages = torch.arange(recent - 1, -1, -1)
        scores[:, scores.shape[1] - recent :] = NEWEST - OLDER * ages
        chosen = scores.topk(self.budget - sink, dim=-1).indices + sink
        positions = torch.cat((torch.arange(sink).expand(len(chosen), -1), chosen), dim=1)
        gather_kv(
            [self.target_caches[layer]],
            [self.caches[layer]],
            self._slots(positions, block_row)[None],
            self._first_slot(context) + torch.arange(self.budget),
            self.layout,
        )
        return positions

    def _first_slot(self, context: PartialContext) -> int:
        return context.region * self.blocks_per_request * self.layout.block_size

    def _slots(self, positions: torch.Tensor, block_row: torch.Tensor) -> torch.Tensor:
        size = self.layout.block_size
        return block_row.long()[positions // size] * size + positions % size
