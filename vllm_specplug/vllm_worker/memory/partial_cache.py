# SPDX-License-Identifier: Apache-2.0
"""Partial caches: a bounded copy of the most important keys and values of a long context.

Per layer and KV head, a cache holds the first `sink` positions and the other positions whose keys
score highest against a query, the most important first. Keys contain their rotary positions and
attention does not depend on their order, so kernels read the copy as a small paged cache.

Later tokens replace the tail, the least important entries. When they reach the sink, the positions
are chosen again (TokenSwift, arXiv 2502.18890, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specplug.kernels import CpuKvLayout, copy_kv, key_scores
from vllm_specplug.kernels.key_scores import NEWEST, OLDER
from vllm_specplug.vllm_worker.memory.regions import Region, RegionPool

# The newest tokens are chosen whatever their score, because text depends on them most. The newest
# one counts as the most important.
RECENT = 32


@dataclass
class PartialContext(Region):
    """One request's part of the pool."""

    covered: int = 0
    """Context tokens among which entries were chosen or replaced; 0 before the first choice."""
    tail: int = 0
    """Entry that the next committed token replaces."""


class PartialCache(RegionPool[PartialContext]):
    """Partial caches of a bounded number of requests, in all layers.

    Args:
        target_caches: the target's paged caches, one per layer, [num_blocks, Hkv, block, 2 * Dh].
        layout: their layout, which the pool shares.
        budget: tokens kept per request, including the sink.
        sink: first positions of the context, which are always kept.
        max_requests: number of requests with a cache. An evicted request that returns chooses
            again.
    """

    def __init__(
        self,
        target_caches: list[torch.Tensor],
        layout: CpuKvLayout,
        budget: int,
        sink: int,
        max_requests: int,
    ) -> None:
        super().__init__(max_requests, PartialContext)
        assert 0 <= sink < budget, (budget, sink)
        self.target_caches, self.layout = target_caches, layout
        self.budget, self.sink = budget, sink
        self.blocks_per_request = -(-budget // layout.block_size)
        self.max_requests = max_requests
        shape = list(target_caches[0].shape)
        # At least one page, on which the layout is measured.
        shape[0] = max(1, max_requests * self.blocks_per_request)
        self.caches = [cache.new_zeros(shape) for cache in target_caches]
        self.views = [layout.views(cache) for cache in self.caches]
        self.target_views = [layout.views(cache) for cache in target_caches]
        # int32 [max_requests, blocks_per_request]: the pages of each region
        pages = torch.arange(max_requests * self.blocks_per_request, dtype=torch.int32)
        self.block_table = pages.view(max_requests, self.blocks_per_request)

    def advance(
        self,
        req_id: str,
        context_len: int,
        # int32 [max_blocks], the request's row of the target's block table
        block_row: torch.Tensor,
    ) -> tuple[PartialContext, bool]:
        """Stores the tokens that were committed since the last call. A draft must not call it for
        more requests than the pool has regions.

        Returns:
            The request's context, and whether `choose` must choose its entries again, layer by
            layer.
        """
        assert context_len > self.budget, (context_len, self.budget)
        context = self.region_of(req_id)
        new = context_len - context.covered
        replaced = self.budget - 1 - context.tail
        if not context.covered or new < 0 or replaced + new > self.budget - self.sink:
            context.covered, context.tail = context_len, self.budget - 1
            return context, True
        if new:
            positions = torch.arange(context.covered, context_len)
            copy_kv(
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
            The positions, int64 [Hkv, budget]: the sink, then in order of decreasing importance.
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
        copy_kv(
            [self.target_caches[layer]],
            [self.caches[layer]],
            self._slots(positions, block_row)[None],
            self._first_slot(context) + torch.arange(self.budget),
            self.layout,
        )
        return positions

    def _first_slot(self, context: PartialContext) -> int:
        return context.index * self.blocks_per_request * self.layout.block_size

    def _slots(self, positions: torch.Tensor, block_row: torch.Tensor) -> torch.Tensor:
        size = self.layout.block_size
        return block_row.long()[positions // size] * size + positions % size
