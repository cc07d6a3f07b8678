# SPDX-License-Identifier: Apache-2.0
"""`partial_cache` on a device: regions of a pool, chosen and filled without a read on the host.

The host decides from bounds of the contexts. A request reads all of its context as long as that may
fit the budget. Its partial cache is chosen again as soon as more tokens may have been committed
than it can replace. The device chooses the positions and counts the committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.device_requests import TokenHistory
from vllm_specplug.kernels import to_device
from vllm_specplug.vllm_worker.memory.partial_cache import RECENT
from vllm_specplug.vllm_worker.memory.regions import Region, RegionPool

# Maximum scores at once, unless one request has more: 32 MiB in float32.
_MAX_SCORES = 1 << 23


@dataclass
class PartialRegion(Region):
    """One request's part of the pool, with lower bounds of its tokens."""

    chosen: int = 0
    """Minimum context tokens at the last choice; 0 before the first one."""
    covered: int = 0
    """Minimum context tokens that were chosen among or stored since."""


@dataclass(frozen=True)
class Moves:
    """Updates of partial caches before a draft forward, and in its layers."""

    # [n] regions of the requests with a partial cache
    regions: list[PartialRegion]
    # [n] whether positions are chosen for each, layer by layer
    due: list[bool]
    # int32 [4, C] columns of the requests to choose for, in parts that are scored at once, each
    # with the maximum context of the part
    chosen: list[tuple[torch.Tensor, int]]


class DevicePartialCache(RegionPool[PartialRegion]):
    """`partial_cache.PartialCache` on a device.

    Args:
        target_caches: the target's paged caches, one per layer, [num_blocks, Hkv, block, 2 * Dh].
        budget, sink, max_requests: see there.
    """

    def __init__(
        self, target_caches: list[torch.Tensor], budget: int, sink: int, max_requests: int
    ) -> None:
        from vllm_specplug.kernels.kv_compact_triton import LayerCaches

        super().__init__(max_requests, PartialRegion)
        self.budget, self.sink = budget, sink
        self.max_requests = max_requests
        # [num_blocks, block_size, Hkv, 2 * Dh]
        self.target_pages = [cache.transpose(1, 2) for cache in target_caches]
        self.block_size = self.target_pages[0].shape[1]
        # Pages of a region.
        self.blocks = -(-budget // self.block_size)
        # One more page: no kernel takes a cache without pages.
        shape = max_requests * self.blocks + 1
        self.pages = [pages.new_zeros((shape, *pages.shape[1:])) for pages in self.target_pages]
        self.caches = [pages.transpose(1, 2) for pages in self.pages]
        # One launch takes caches of one shape and stride.
        alike: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for pages, pool in zip(self.target_pages, self.pages, strict=True):
            kind = pages.shape, pages.stride(), pages.dtype
            alike.setdefault(kind, []).append((pages, pool))
        self.layers = [LayerCaches.of(pairs) for pairs in alike.values()]
        device = target_caches[0].device
        # int32 [max_requests, blocks]: the pages of each region
        self.block_table = torch.arange(
            max_requests * self.blocks, dtype=torch.int32, device=device
        ).view(max_requests, self.blocks)
        # [max_requests] int64: `covered` of each region, and the entry that its next token replaces
        self.covered = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self.tails = torch.zeros_like(self.covered)

    def warm_up(self, num_heads: int, dtype: torch.dtype) -> None:
        """Compiles the kernels of drafts. Call it before there are requests, because it writes the
        first region.

        Args:
            num_heads: query heads of the target on this rank.
        """
        if not self.max_requests:
            return
        device = self.covered.device
        # Kernels have no variants by the number of requests or by the address.
        columns = torch.zeros((4, 1), dtype=torch.int32, device=device)
        lens = torch.zeros(1, dtype=torch.int64, device=device)
        table = torch.zeros((1, 1), dtype=torch.int32, device=device)
        self._take_in(columns, lens, table)
        self._count(columns, lens)
        moves = Moves([], [], [(columns, self.budget)])
        for layer, pages in enumerate(self.target_pages):
            shape = 1, num_heads, pages.shape[3] // 2
            query = torch.zeros(shape, dtype=dtype, device=device)
            self.choose(layer, moves, query, lens + 1, table)

    def is_due(self, history: TokenHistory, r: int) -> bool:
        """Returns whether positions must be chosen for a request before its next draft."""
        region = self.regions.get(history.req_ids[r])
        if region is None or not region.chosen:
            return True
        return history.max_context_lens[r] - region.chosen > self.budget - self.sink

    def advance(
        self,
        history: TokenHistory,
        # [R] int64 tokens of the contexts
        lens: torch.Tensor,
        # indices of the requests that read partial caches
        partial: Sequence[int],
        # int32 [B, max_blocks]
        block_table: torch.Tensor,
    ) -> Moves:
        """Stores the tokens that were committed since the last draft. If a choice is due, it only
        counts them, and `choose` chooses positions layer by layer."""
        regions, due = [], []
        # Columns for `kernels.partial_cache_triton`, and the maximum context of each in `chosen`.
        chosen: list[tuple[int, ...]] = []
        grown: list[tuple[int, ...]] = []
        most: list[int] = []
        for r in partial:
            is_due = self.is_due(history, r)
            region = self.region_of(history.req_ids[r])
            # A batch's requests are the first rows of its block table.
            column = r, r, region.index, int(is_due)
            if is_due:
                region.chosen = history.min_context_lens[r]
                chosen.append(column)
                most.append(history.max_context_lens[r])
            elif history.max_context_lens[r] > region.covered:
                grown.append(column)
            region.covered = history.min_context_lens[r]
            regions.append(region)
            due.append(is_due)
        parts: list[tuple[torch.Tensor, int]] = []
        if chosen or grown:
            device = self.covered.device
            moved = to_device(np.array([*chosen, *grown], np.int32).T.copy(), device)
            if grown:
                self._take_in(moved[:, len(chosen) :], lens, block_table)
            self._count(moved, lens)
            parts = [
                (moved[:, first:last], max(most[first:last]))
                for first, last in _parts(most, self.target_pages[0].shape[2])
            ]
        return Moves(regions, due, parts)

    def _take_in(
        self, columns: torch.Tensor, lens: torch.Tensor, block_table: torch.Tensor
    ) -> None:
        from vllm_specplug.kernels.partial_cache_triton import append_to_tail_triton

        for layers in self.layers:
            append_to_tail_triton(
                layers, columns, lens, self.covered, self.tails, block_table, blocks=self.blocks
            )

    def _count(self, columns: torch.Tensor, lens: torch.Tensor) -> None:
        from vllm_specplug.kernels.partial_cache_triton import count_tokens_triton

        count_tokens_triton(columns, lens, self.covered, self.tails, budget=self.budget)

    def choose(
        self,
        layer: int,
        moves: Moves,
        # [R, Hq, Dh], rotated, of the tokens that follow the contexts
        query: torch.Tensor,
        # [R] int64 tokens of the contexts
        lens: torch.Tensor,
        # int32 [B, max_blocks]
        block_table: torch.Tensor,
    ) -> None:
        """Fills one layer's entries of the due requests with the sink and then the most important
        positions, in order of decreasing importance."""
        from vllm_specplug.kernels.partial_cache_triton import (
            gather_chosen_triton,
            score_keys_triton,
        )

        pages, pool, kept = self.target_pages[layer], self.pages[layer], self.budget - self.sink
        for columns, most in moves.chosen:
            scores = score_keys_triton(
                query, pages, columns, lens, block_table,
                sink=self.sink, recent=min(RECENT, kept), most=most,
            )  # fmt: skip
            gather_chosen_triton(
                scores.topk(kept, dim=-1).indices, pages, pool, columns, lens, block_table,
                sink=self.sink, blocks=self.blocks,
            )  # fmt: skip


def _parts(most: Sequence[int], heads: int) -> list[tuple[int, int]]:
    """Returns the first and last index of the requests that are scored at once, given their maximum
    contexts `most` [C]."""
    parts, first = [], 0
    for last in range(1, len(most) + 1):
        longest = max(most[first : last + 1])
        if last == len(most) or (last + 1 - first) * heads * longest > _MAX_SCORES:
            parts.append((first, last))
            first = last
    return parts


def partial_of(history: TokenHistory, budget: int) -> list[int]:
    """Returns the indices of the requests that read partial caches: requests with a draft whose
    context certainly exceeds the budget."""
    bounds = zip(history.min_context_lens, history.is_drafted, strict=True)
    return [r for r, (least, drafted) in enumerate(bounds) if drafted and least > budget]
