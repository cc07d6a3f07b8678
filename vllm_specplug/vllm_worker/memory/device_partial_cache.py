# SPDX-License-Identifier: Apache-2.0
"""`partial_cache` on a device: regions of a pool, chosen and filled without a read on the host.

What the host decides it decides from bounds of the contexts: whether a request reads all of its
context (for as long as it may fit the budget), and when its partial cache is chosen again (as soon
as more tokens may have come than it takes in). What is chosen, and which tokens came since, is
decided where they lie.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.kernels import TreeAttnMetadata, to_device
from vllm_specplug.vllm_worker.memory.partial_cache import RECENT

# Scores that exist at once, unless one request has more: in float32, 32 MiB.
_MOST_SCORES = 1 << 23


@dataclass
class Region:
    """One request's part of the pool, and bounds of what it has taken in."""

    index: int
    chosen: int = 0
    """Context tokens at the last choice, at least; 0 before the first one."""
    covered: int = 0
    """Context tokens taken in, at least."""


@dataclass(frozen=True)
class Contexts:
    """R requests that a draft forward is made for."""

    req_ids: Sequence[str]
    # [R] bounds of the contexts
    min_context_lens: Sequence[int]
    max_context_lens: Sequence[int]
    # [R] whether a request gets a draft
    is_drafted: Sequence[bool]
    # [R] row of each in the block table
    rows: Sequence[int]
    # [R] int64
    anchors: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def of(cls, requests: DraftRequests | DeviceRequests, device: torch.device) -> Contexts:
        if not isinstance(requests, DeviceRequests):
            lens = requests.context_lens
            anchors, contexts = device_tensor(np.array([requests.anchors, lens]), device)
            drafted = [True] * len(requests)
            return cls(
                requests.req_ids, lens, lens, drafted, requests.req_indices, anchors, contexts
            )
        history = requests.history
        assert history is not None and requests.rows is None
        return cls(
            history.req_ids,
            history.min_context_lens,
            history.max_context_lens,
            history.is_drafted,
            range(len(requests)),
            requests.anchors,
            requests.context_lens.long(),
        )


@dataclass(frozen=True)
class Moves:
    """What partial caches take in before a draft forward, and in its layers."""

    # [n] of the requests with a partial cache
    regions: list[Region]
    # [n] whether each is chosen for, layer by layer
    due: list[bool]
    # int32 [4, C] of those that are, in parts that are scored at once, and the bound of the
    # contexts of each part
    chosen: list[tuple[torch.Tensor, int]]


class DevicePartialCache:
    """`partial_cache.PartialCache` on a device.

    Args:
        target_caches: the target's paged caches, one per layer, [num_blocks, Hkv, block, 2 * Dh].
        budget, sink, refresh, max_requests: see there.
    """

    def __init__(
        self, target_caches: list[torch.Tensor], budget: int, sink: int, refresh: int,
        max_requests: int,
    ) -> None:  # fmt: skip
        from vllm_specplug.kernels.kv_compact_triton import LayerCaches

        self.budget, self.sink, self.refresh = budget, sink, refresh
        self.max_requests = max_requests
        # [num_blocks, block_size, Hkv, 2 * Dh]
        self.target_pages = [cache.transpose(1, 2) for cache in target_caches]
        self.block_size = self.target_pages[0].shape[1]
        # Pages of a region.
        self.blocks = -(-budget // self.block_size)
        # Even for no request, as there is no kernel for a cache without pages.
        shape = max_requests * self.blocks + 1
        self.pages = [pages.new_zeros((shape, *pages.shape[1:])) for pages in self.target_pages]
        self.caches = [pages.transpose(1, 2) for pages in self.pages]
        # Of one shape and stride, which one launch takes.
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
        # [max_requests] int64: context tokens that a region has taken in, and the entry that the
        # next one replaces
        self.covered = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self.tails = torch.zeros_like(self.covered)
        # Least recently used first.
        self.regions: OrderedDict[str, Region] = OrderedDict()
        self.free = list(range(max_requests - 1, -1, -1))

    @property
    def num_bytes(self) -> int:
        """Memory of the pool; it never grows."""
        return sum(pages.numel() * pages.element_size() for pages in self.pages)

    def warm_up(self, num_heads: int, dtype: torch.dtype) -> None:
        """Compiles what drafts launch. Call before there are requests: writes the first region.

        Args:
            num_heads: query heads of the target on this rank.
        """
        if not self.max_requests:
            return
        device = self.covered.device
        # Kernels have no variant for a number of requests, nor for a place in memory.
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

    def forget(self, req_ids: Iterable[str]) -> None:
        """Frees the regions of requests that ended or were preempted."""
        for req_id in req_ids:
            region = self.regions.pop(req_id, None)
            if region is not None:
                self.free.append(region.index)

    def is_due(self, contexts: Contexts, r: int) -> bool:
        """Whether a request's partial cache is to be chosen before its next draft."""
        region = self.regions.get(contexts.req_ids[r])
        if region is None or not region.chosen:
            return True
        return contexts.max_context_lens[r] - region.chosen > self.refresh

    def advance(
        self,
        contexts: Contexts,
        # requests of these that read partial caches
        partial: Sequence[int],
        # int32 [B, max_blocks]
        block_table: torch.Tensor,
    ) -> Moves:
        """Takes in what was committed since the last draft. Where a choice is due, its tokens are
        counted alone: `choose` makes it, layer by layer."""
        regions, due = [], []
        # Columns of `partial_cache`, and the bound of the context of each that is chosen for.
        chosen: list[tuple[int, ...]] = []
        grown: list[tuple[int, ...]] = []
        most: list[int] = []
        for r in partial:
            is_due = self.is_due(contexts, r)
            region = self._region(contexts.req_ids[r])
            column = r, contexts.rows[r], region.index, int(is_due)
            if is_due:
                region.chosen = contexts.min_context_lens[r]
                chosen.append(column)
                most.append(contexts.max_context_lens[r])
            elif contexts.max_context_lens[r] > region.covered:
                grown.append(column)
            region.covered = contexts.min_context_lens[r]
            regions.append(region)
            due.append(is_due)
        parts: list[tuple[torch.Tensor, int]] = []
        if chosen or grown:
            device = self.covered.device
            moved = to_device(np.array([*chosen, *grown], np.int32).T.copy(), device)
            if grown:
                self._take_in(moved[:, len(chosen) :], contexts.lens, block_table)
            self._count(moved, contexts.lens)
            parts = [
                (moved[:, first:last], max(most[first:last]))
                for first, last in _parts(most, self.target_pages[0].shape[2])
            ]
        return Moves(regions, due, parts)

    def _region(self, req_id: str) -> Region:
        region = self.regions.pop(req_id, None)
        if region is None:
            if not self.free:
                self.free.append(self.regions.popitem(last=False)[1].index)
            region = Region(self.free.pop())
        self.regions[req_id] = region
        return region

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
        """Fills one layer's entries of the requests that are due with the sink and then with the
        most important positions, by falling importance."""
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
    """First and last of requests, of contexts up to `most` [C], that are scored at once."""
    parts, first = [], 0
    for last in range(1, len(most) + 1):
        longest = max(most[first : last + 1])
        if last == len(most) or (last + 1 - first) * heads * longest > _MOST_SCORES:
            parts.append((first, last))
            first = last
    return parts


def partial_of(contexts: Contexts, budget: int) -> list[int]:
    """Requests that read partial caches: those that are drafted for whose contexts are certain not
    to fit in the budget."""
    bounds = zip(contexts.min_context_lens, contexts.is_drafted, strict=True)
    return [r for r, (least, drafted) in enumerate(bounds) if drafted and least > budget]


def single_rows(
    # of `TreeAttnMetadata.plan`, int32 [R] each
    columns: Sequence[torch.Tensor],
    block_table: torch.Tensor,
    max_context: int,
) -> TreeAttnMetadata:
    """Metadata of single query rows, each followed by nothing but itself."""
    ones = torch.ones((len(columns[0]), 1), dtype=torch.int64, device=columns[0].device)
    return TreeAttnMetadata(
        torch.stack(tuple(columns)),
        block_table,
        max_rows=1,
        max_context=max_context,
        mask_words=ones,
        parent_rows=torch.full_like(columns[0], -1),
    )
