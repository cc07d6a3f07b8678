# SPDX-License-Identifier: Apache-2.0
"""`self_draft` on a device: the target's layers over partial caches, without a read on the host.

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
from vllm.logger import init_logger

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import DraftRequests, PartialCacheSpec, device_tensor
from vllm_specplug.kernels import TreeAttnMetadata, to_device
from vllm_specplug.vllm_attention.draft_attention import DraftAttention
from vllm_specplug.vllm_worker.cuda_backend import CudaDraftRows, CudaKernels
from vllm_specplug.vllm_worker.partial_cache import RECENT
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.self_draft import regions_of

logger = init_logger("vllm.specplug.self_draft")

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
    least: Sequence[int]
    most: Sequence[int]
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
            history.least,
            history.most,
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
    """`kvcache.partial_cache.PartialCache` on a device.

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
        return contexts.most[r] - region.chosen > self.refresh

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
                region.chosen = contexts.least[r]
                chosen.append(column)
                most.append(contexts.most[r])
            elif contexts.most[r] > region.covered:
                grown.append(column)
            region.covered = contexts.least[r]
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


class DevicePartialAttention(DraftAttention):
    """Attention of one draft forward, layer by layer; see `self_draft.PartialAttention`."""

    def __init__(
        self,
        rows: CudaDraftRows,
        pool: DevicePartialCache,
        pool_views: Sequence[Any],
        layer_index: dict[str, int],
        contexts: Contexts,
    ) -> None:
        self.rows, self.pool, self.pool_views = rows, pool, pool_views
        self.layer_index, self.contexts = layer_index, contexts
        self.block_table = rows.block_table()
        self.partial = partial_of(contexts, pool.budget)
        self.moves = pool.advance(contexts, self.partial, self.block_table)
        self.regions, self.due = self.moves.regions, self.moves.due
        count, device = len(contexts.req_ids), contexts.lens.device
        plan = np.zeros((5, count), np.int64)
        # Whoever gets no draft attends itself alone.
        plan[0] = list(contexts.rows)
        plan[1] = 1
        plan[1, self.partial] = 0
        plan[2] = list(contexts.is_drafted)
        plan[3, self.partial] = [region.index for region in self.regions]
        plan[4, self.partial] = 1
        tables, whole, drafted, regions, is_partial = device_tensor(plan, device).to(torch.int32)
        every = torch.arange(count, dtype=torch.int32, device=device)
        lens = contexts.lens.to(torch.int32) * drafted
        most = [m for m, d in zip(contexts.most, contexts.is_drafted, strict=True) if d]
        # Of all requests where every one of them reads its partial cache.
        self.whole: TreeAttnMetadata | None = None
        if len(self.partial) < count:
            columns = (tables, every, whole, lens, every)
            self.whole = single_rows(columns, self.block_table, max(most, default=0))
        self.part: TreeAttnMetadata | None = None
        if self.partial:
            budget = torch.full_like(lens, pool.budget)
            columns = (regions, every, is_partial, budget, every)
            self.part = single_rows(columns, pool.block_table, pool.budget)

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        index, contexts = self.layer_index[layer.layer_name], self.contexts
        if self.moves.chosen:
            self.pool.choose(index, self.moves, query, contexts.lens, self.block_table)
        kernel = self.rows.kernel_for(query, key)
        for metadata, views in (
            (self.whole, self.rows.views[index]),
            (self.part, self.pool_views[index]),
        ):
            if metadata is not None:
                kernel.run(query, *views, output, metadata, layer.impl.scale, key, value)


def partial_of(contexts: Contexts, budget: int) -> list[int]:
    """Requests that read partial caches: those that are drafted for whose contexts are certain not
    to fit in the budget."""
    bounds = zip(contexts.least, contexts.is_drafted, strict=True)
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


class DeviceSelfDraft:
    """`drafting.drafter.TargetForward` over a vLLM model runner on a device.

    Args:
        state: of the model runner; its caches must be bound to the backend.
    """

    def __init__(self, state: RunnerView, spec: PartialCacheSpec, backend: CudaKernels) -> None:
        # Which needs what is above.
        from vllm_specplug.vllm_worker.graph_self_draft import GraphSelfDraft

        self.state, self.spec = state, spec
        caches = state.target_caches()
        self.layer_index = {name: i for i, name in enumerate(caches)}
        kv_caches = list(caches.values())
        self.rows = CudaDraftRows(backend, kv_caches, state.block_table, 1.0)
        self.pool = DevicePartialCache(
            kv_caches,
            spec.budget,
            spec.sink,
            spec.refresh,
            regions_of(state, spec),
        )
        views = backend.views_of(self.pool.caches[0])
        self.pool_views = [views(cache) for cache in self.pool.caches]
        self.graphs = GraphSelfDraft(self)
        logger.info(
            "Partial caches: %d requests with %d tokens each, %.1f MiB",
            self.pool.max_requests,
            spec.budget,
            self.pool.num_bytes / 2**20,
        )

    def can_run(self, requests: DraftRequests | DeviceRequests) -> bool:
        """Whether the pool has room for all of these requests at once."""
        lens: Iterable[int]
        if isinstance(requests, DeviceRequests):
            history = requests.history
            assert history is not None
            # Lower bounds come late, on each rank at its own time, and either all ranks run the
            # target or none does.
            most = self.state.max_model_len
            lens = [
                min(n, most) for n, d in zip(history.most, history.is_drafted, strict=True) if d
            ]
        else:
            lens = requests.context_lens
        return sum(length > self.spec.budget for length in lens) <= self.pool.max_requests

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops partial caches of requests that ended or were preempted."""
        self.pool.forget(req_ids)

    @property
    def captures(self) -> bool:
        """See the protocol."""
        return self.graphs.is_possible

    def prepare(self, requests: DeviceRequests) -> bool:
        """See the protocol."""
        return self.graphs.prepare(requests)

    def __call__(
        self, requests: DraftRequests | DeviceRequests
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs each request's anchor; see the protocol."""
        if isinstance(requests, DeviceRequests) and requests.history is None:
            return self.graphs(requests)
        contexts = Contexts.of(requests, self.state.device)
        attention = DevicePartialAttention(
            self.rows, self.pool, self.pool_views, self.layer_index, contexts
        )
        return self.run(attention, contexts.anchors, contexts.lens, contexts.rows)

    def run(
        self,
        attention: DraftAttention,
        # [R] each
        anchors: torch.Tensor,
        lens: torch.Tensor,
        rows: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's forward of anchors behind contexts of `lens` tokens."""
        # Of requests that get no draft both may be anything.
        ids = anchors.clamp(0, self.state.vocab_size - 1).to(torch.int32)
        positions = lens.clamp(0, self.state.max_model_len - 1)
        layers = dict.fromkeys(self.layer_index, attention)
        hidden, aux = self.state.forward(ids, positions, layers, list(rows))
        return hidden[: len(ids)], aux[0][: len(ids)]
