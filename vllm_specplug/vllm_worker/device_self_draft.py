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
from vllm_specplug.kernels import TreeAttnMetadata
from vllm_specplug.kvcache.partial_cache import RECENT
from vllm_specplug.vllm_attention.draft_attention import DraftAttention
from vllm_specplug.vllm_worker.cuda_backend import CudaDraftRows, CudaKernels
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.self_draft import regions_of

logger = init_logger("vllm.specplug.self_draft")

# Tokens whose keys are scored at once: their keys are copied, in float32.
_SCORED_TOKENS = 4096


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
        self.budget, self.sink, self.refresh = budget, sink, refresh
        self.max_requests = max_requests
        # [num_blocks, block_size, Hkv, 2 * Dh]
        self.target_pages = [cache.transpose(1, 2) for cache in target_caches]
        self.block_size = self.target_pages[0].shape[1]
        blocks = -(-budget // self.block_size)
        self.stride = blocks * self.block_size
        # The last page takes what is to be written nowhere.
        self.pages = [
            pages.new_zeros((max_requests * blocks + 1, *pages.shape[1:]))
            for pages in self.target_pages
        ]
        self.caches = [pages.transpose(1, 2) for pages in self.pages]
        device = target_caches[0].device
        # int32 [max_requests, blocks]: the pages of each region
        self.block_table = torch.arange(
            max_requests * blocks, dtype=torch.int32, device=device
        ).view(max_requests, blocks)
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

    def forget(self, req_ids: Iterable[str]) -> None:
        """Frees the regions of requests that ended or were preempted."""
        for req_id in req_ids:
            region = self.regions.pop(req_id, None)
            if region is not None:
                self.free.append(region.index)

    def advance(
        self,
        contexts: Contexts,
        # requests of these that read partial caches
        partial: Sequence[int],
        # int32 [B, max_blocks]
        block_table: torch.Tensor,
    ) -> tuple[list[Region], list[bool]]:
        """Takes in what was committed since the last draft.

        Returns:
            The region of each of the `partial`, and whether it is to be chosen by `choose`, layer
            by layer.
        """
        regions, due = [], []
        # Region, request and how many tokens may be new.
        grown: list[tuple[int, int, int]] = []
        for r in partial:
            region = self._region(contexts.req_ids[r])
            is_due = not region.chosen or contexts.most[r] - region.chosen > self.refresh
            if is_due:
                region.chosen = contexts.least[r]
            elif contexts.most[r] > region.covered:
                grown.append((region.index, r, contexts.most[r] - region.covered))
            region.covered = contexts.least[r]
            regions.append(region)
            due.append(is_due)
        if grown:
            self._take_in(contexts, grown, block_table)
        chosen = [
            (region.index, r) for region, r, d in zip(regions, partial, due, strict=True) if d
        ]
        if chosen:
            index, rows = device_tensor(np.array(chosen).T, self.covered.device)
            self.covered[index] = contexts.lens[rows]
            self.tails.index_fill_(0, index, self.budget - 1)
        return regions, due

    def _region(self, req_id: str) -> Region:
        region = self.regions.pop(req_id, None)
        if region is None:
            if not self.free:
                self.free.append(self.regions.popitem(last=False)[1].index)
            region = Region(self.free.pop())
        self.regions[req_id] = region
        return region

    def _take_in(
        self, contexts: Contexts, grown: list[tuple[int, int, int]], block_table: torch.Tensor
    ) -> None:
        device = self.covered.device
        columns = [(index, r, contexts.rows[r]) for index, r, _ in grown]
        index, requests, rows = device_tensor(np.array(columns).T, device)
        width = max(count for _, _, count in grown)
        ends, before = contexts.lens[requests], self.covered[index]
        back = torch.arange(width, device=device)
        # [n, width]
        positions = before[:, None] + back
        slots = index[:, None] * self.stride + self.tails[index][:, None] - back
        nowhere = len(self.block_table) * self.stride
        slots = torch.where(positions < ends[:, None], slots, nowhere)
        blocks, places = self._places(positions, block_table[rows])
        for source, target in zip(self.target_pages, self.pages, strict=True):
            target.flatten(0, 1)[slots.flatten()] = source[blocks.flatten(), places.flatten()]
        self.covered[index] = ends
        self.tails[index] = self.tails[index] - (ends - before)

    def choose(
        self,
        layer: int,
        region: Region,
        # [Hq, Dh], rotated, of the token that follows the context
        query: torch.Tensor,
        # [] int64 tokens of the context, and their bound
        length: torch.Tensor,
        most: int,
        # int32 [max_blocks], the request's row of the target's block table
        block_row: torch.Tensor,
    ) -> torch.Tensor:
        """Fills one layer's entries with the sink and the most important positions.

        Returns:
            The positions, int64 [Hkv, budget]: the sink, then by falling importance.
        """
        pages, size, device = self.target_pages[layer], self.block_size, query.device
        heads, dim = pages.shape[2], pages.shape[3] // 2
        blocks = block_row[: -(-most // size)].clamp(0, len(pages) - 1).long()
        # A sum of products with one key is the product of the sum.
        summed = query.float().unflatten(0, (heads, -1)).sum(1)
        scores = torch.cat(
            [
                torch.einsum("nshd,hd->hns", pages[part][..., :dim].float(), summed).flatten(1)
                for part in blocks.split(max(1, _SCORED_TOKENS // size))
            ],
            dim=1,
        )
        at = torch.arange(scores.shape[1], device=device)
        recent = min(RECENT, self.budget - self.sink)
        scores = scores.masked_fill(at >= length - recent, float("inf"))
        scores = scores.masked_fill((at < self.sink) | (at >= length), float("-inf"))
        chosen = scores.topk(self.budget - self.sink, dim=-1).indices
        sink = torch.arange(self.sink, device=device).expand(heads, -1)
        positions = torch.cat((sink, chosen), dim=1)
        every = torch.arange(heads, device=device)[:, None]
        found = pages[blocks[positions // size], positions % size, every]
        first = region.index * self.stride
        self.pages[layer].flatten(0, 1)[first : first + self.budget] = found.transpose(0, 1)
        return positions

    def _places(
        self, positions: torch.Tensor, tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and places in them of positions [n, w] by tables [n, blocks]."""
        columns = (positions // self.block_size).clamp_max(tables.shape[1] - 1)
        blocks = tables.gather(1, columns).clamp(0, len(self.target_pages[0]) - 1)
        return blocks.long(), positions % self.block_size


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
        self.partial = [
            r
            for r, (least, drafted) in enumerate(
                zip(contexts.least, contexts.is_drafted, strict=True)
            )
            if drafted and least > pool.budget
        ]
        self.regions, self.due = pool.advance(contexts, self.partial, self.block_table)
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
            self.whole = _single_rows(columns, self.block_table, max(most, default=0))
        self.part: TreeAttnMetadata | None = None
        if self.partial:
            budget = torch.full_like(lens, pool.budget)
            columns = (regions, every, is_partial, budget, every)
            self.part = _single_rows(columns, pool.block_table, pool.budget)

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        index, contexts = self.layer_index[layer.layer_name], self.contexts
        for r, region, is_due in zip(self.partial, self.regions, self.due, strict=True):
            if is_due:
                self.pool.choose(
                    index, region, query[r], contexts.lens[r], contexts.most[r],
                    self.block_table[contexts.rows[r]],
                )  # fmt: skip
        kernel = self.rows.kernel_for(query, key)
        for metadata, views in (
            (self.whole, self.rows.views[index]),
            (self.part, self.pool_views[index]),
        ):
            if metadata is not None:
                kernel.run(query, *views, output, metadata, layer.impl.scale, key, value)


def _single_rows(
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

    def __call__(
        self, requests: DraftRequests | DeviceRequests
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs each request's anchor; see the protocol."""
        count = len(requests)
        contexts = Contexts.of(requests, self.state.device)
        attention = DevicePartialAttention(
            self.rows, self.pool, self.pool_views, self.layer_index, contexts
        )
        # Of requests that get no draft both may be anything.
        anchors = contexts.anchors.clamp(0, self.state.vocab_size - 1)
        positions = contexts.lens.clamp(0, self.state.max_model_len - 1)
        hidden, aux = self.state.forward(
            anchors.to(torch.int32),
            positions,
            dict.fromkeys(self.layer_index, attention),
            list(contexts.rows),
        )
        return hidden[:count], aux[0][:count]
