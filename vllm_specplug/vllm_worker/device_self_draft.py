# SPDX-License-Identifier: Apache-2.0
"""`self_draft` on a device: the target's layers over partial caches; the host reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.caches import PartialCacheSpec
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.kernels import TreeAttnMetadata, copy_to_device, single_row_metadata
from vllm_specplug.vllm_attention.tree_rows import DraftAttention
from vllm_specplug.vllm_worker.cuda_kernels import CudaKernels
from vllm_specplug.vllm_worker.memory.device_draft_cache import CudaDraftRows, table_rows
from vllm_specplug.vllm_worker.memory.device_partial_cache import (
    DevicePartialCache,
    partial_of,
)
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.self_draft import SelfDraft


class PartialReads(DraftAttention):
    """Attention of one draft forward, layer by layer; see `self_draft.PartialAttention`.

    The device holds each request's region, so that a graph can hold the forward.

    Args:
        max_context: limit on the contexts of requests that read all of theirs; None if there are no
            such requests.
        has_partial: whether requests may read a partial cache.
    """

    def __init__(
        self,
        draft: DeviceSelfDraft,
        # [R] int32 row of each request in the block table
        tables: torch.Tensor,
        # [R] tokens of each context
        lens: torch.Tensor,
        # [R] bool; a request without a draft attends only itself
        is_drafted: torch.Tensor,
        # [R] int32 region of each, -1 for requests that read all of their context
        regions: torch.Tensor,
        max_context: int | None,
        has_partial: bool,
    ) -> None:
        self.draft = draft
        is_partial = ((regions >= 0) & is_drafted).to(torch.int32)
        lens = torch.where(is_drafted, lens, 0).to(torch.int32)
        # Metadata, and the caches that it is of, by layer.
        self.reads: list[tuple[TreeAttnMetadata, Sequence[Any]]] = []
        if max_context is not None:
            table = draft.rows.block_table()
            full = single_row_metadata(tables, lens, 1 - is_partial, table, max_context)
            self.reads.append((full, draft.rows.views))
        if has_partial:
            pool = draft.pool
            budget = torch.full_like(lens, pool.budget)
            part = single_row_metadata(
                regions.clamp_min(0), budget, is_partial, pool.block_table, pool.budget
            )
            self.reads.append((part, draft.pool_views))

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        index = self.draft.layer_index[layer.layer_name]
        kernel = self.draft.rows.kernel_for(query, key)
        for metadata, views in self.reads:
            kernel.run(query, *views[index], output, metadata, layer.impl.scale, key, value)


class DevicePartialAttention(PartialReads):
    """`PartialReads` of a forward that is launched: layers choose positions where that is due."""

    def __init__(self, draft: DeviceSelfDraft, requests: DeviceRequests) -> None:
        pool, history = draft.pool, requests.history
        assert history is not None and requests.rows is None
        self.history, self.lens = history, requests.context_lens.long()
        self.block_table = draft.rows.block_table()
        self.partial = partial_of(history, pool.budget)
        self.moves = pool.advance(history, self.lens, self.partial, self.block_table)
        sent = np.full((2, len(requests)), -1, np.int64)
        sent[0] = history.is_drafted
        sent[1, self.partial] = [region.index for region in self.moves.regions]
        drafted, regions = device_tensor(sent, self.lens.device).to(torch.int32)
        most = [m for m, d in zip(history.max_context_lens, history.is_drafted, strict=True) if d]
        # With a partial cache for each request, a kernel less runs in every layer.
        reads_all = len(self.partial) < len(requests)
        super().__init__(
            draft,
            table_rows(requests),
            self.lens,
            drafted > 0,
            regions,
            max_context=max(most, default=0) if reads_all else None,
            has_partial=bool(self.partial),
        )

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        if self.moves.chosen:
            index = self.draft.layer_index[layer.layer_name]
            self.draft.pool.choose(index, self.moves, query, self.lens, self.block_table)
        super().attend(layer, query, key, value, output)


class DeviceSelfDraft(SelfDraft):
    """`SelfDraft` on a device.

    CUDA graphs hold draft forwards of requests whose partial caches, if they have one, are already
    chosen. Before a replay the host stores new tokens and writes each request's region to the
    graph's memory. A forward that chooses positions runs without a graph: in a graph, every replay
    would compute scores and their top-k in every layer, for the maximum number of requests and the
    longest context.

    Args:
        state: the model runner, whose caches must be bound to the backend.
    """

    def __init__(self, state: RunnerView, spec: PartialCacheSpec, backend: CudaKernels) -> None:
        super().__init__(state, spec)
        kv_caches = list(state.target_caches().values())
        self.rows = CudaDraftRows(backend, kv_caches, state.block_table, 1.0)
        views = backend.views_of(self.pool.caches[0])
        self.pool_views = [views(cache) for cache in self.pool.caches]
        # [B] region of each request of the batch, on the device and on the host; graphs read it
        self.regions = torch.full((state.max_requests,), -1, dtype=torch.int32, device=state.device)
        self._regions = np.full(state.max_requests, -1, np.int32)

    def make_pool(self, kv_caches: list[torch.Tensor], max_requests: int) -> DevicePartialCache:
        return DevicePartialCache(kv_caches, self.spec.budget, self.spec.sink, max_requests)

    def can_run(self, requests: DraftRequests | DeviceRequests) -> bool:
        assert isinstance(requests, DeviceRequests) and requests.history is not None
        history, most = requests.history, self.state.max_model_len
        # All ranks or none must run the target, and each rank learns lower bounds at its own time.
        drafted = zip(history.max_context_lens, history.is_drafted, strict=True)
        return self.has_room(min(length, most) for length, is_drafted in drafted if is_drafted)

    @property
    def captures(self) -> bool:
        """Whether graphs may hold the forward: on one rank, without LoRA adapters.

        The host sets adapters. Ranks read steps at different times, so that one would replay a
        forward while another launches it, and their all-reduces would not match.
        """
        parallel = self.state.vllm_config.parallel_config
        is_only_rank = parallel.world_size == 1 and parallel.data_parallel_size == 1
        return is_only_rank and self.state.runner.lora_config is None

    def prepare(self, requests: DeviceRequests) -> bool:
        """See the protocol."""
        history = requests.history
        assert history is not None and requests.rows is None
        partial = partial_of(history, self.pool.budget)
        if any(self.pool.is_due(history, r) for r in partial):
            return False
        lens, table = requests.context_lens.long(), self.rows.block_table()
        moves = self.pool.advance(history, lens, partial, table)
        self._send(len(requests), partial, [region.index for region in moves.regions])
        return True

    def _send(self, count: int, partial: Sequence[int], regions: Sequence[int]) -> None:
        sent = np.full(count, -1, np.int32)
        sent[list(partial)] = regions
        # Regions stay the same while no request starts, ends or outgrows the budget.
        if not np.array_equal(sent, self._regions[:count]):
            self._regions[:count] = sent
            copy_to_device(sent, self.regions[:count])

    def graph_attention(self, requests: DeviceRequests) -> PartialReads:
        """Returns the attention of a forward in a graph."""
        assert requests.rows is not None
        return PartialReads(
            self,
            requests.rows.to(torch.int32),
            requests.context_lens,
            requests.budgets > 0,
            self.regions[requests.rows.long()],
            max_context=self.state.max_model_len,
            has_partial=self.pool.max_requests > 0,
        )

    def __call__(
        self, requests: DraftRequests | DeviceRequests
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs each request's anchor; see the protocol."""
        assert isinstance(requests, DeviceRequests)
        if requests.history is None:
            attention: DraftAttention = self.graph_attention(requests)
        else:
            attention = DevicePartialAttention(self, requests)
        # Anchors and lengths of requests without a draft may be anything.
        ids = requests.anchors.clamp(0, self.state.vocab_size - 1).to(torch.int32)
        positions = requests.context_lens.long().clamp(0, self.state.max_model_len - 1)
        layers = dict.fromkeys(self.layer_index, attention)
        hidden, aux = self.state.forward(ids, positions, layers, range(len(ids)))
        return hidden[: len(ids)], aux[0][: len(ids)]
