# SPDX-License-Identifier: Apache-2.0
"""`self_draft` on a device: the target's layers over partial caches; the host reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_specplug.drafting.caches import PartialCacheSpec
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.kernels import TreeAttnMetadata
from vllm_specplug.vllm_attention.tree_rows import DraftAttention
from vllm_specplug.vllm_worker.cuda_kernels import CudaKernels
from vllm_specplug.vllm_worker.graph_self_draft import GraphSelfDraft
from vllm_specplug.vllm_worker.memory.device_draft_cache import CudaDraftRows
from vllm_specplug.vllm_worker.memory.device_partial_cache import (
    Contexts,
    DevicePartialCache,
    partial_of,
    single_rows,
)
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.self_draft import regions_of

logger = init_logger("vllm.specplug.self_draft")


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
        # A request without a draft attends only itself.
        plan[0] = list(contexts.rows)
        plan[1] = 1
        plan[1, self.partial] = 0
        plan[2] = list(contexts.is_drafted)
        plan[3, self.partial] = [region.index for region in self.regions]
        plan[4, self.partial] = 1
        tables, is_full, drafted, regions, is_partial = device_tensor(plan, device).to(torch.int32)
        every = torch.arange(count, dtype=torch.int32, device=device)
        lens = contexts.lens.to(torch.int32) * drafted
        most = [m for m, d in zip(contexts.max_context_lens, contexts.is_drafted, strict=True) if d]
        # Metadata over the paged caches; None if all requests read their partial caches.
        self.full: TreeAttnMetadata | None = None
        if len(self.partial) < count:
            columns = (tables, every, is_full, lens, every)
            self.full = single_rows(columns, self.block_table, max(most, default=0))
        # Metadata over the partial caches; None if no request reads one.
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
            (self.full, self.rows.views[index]),
            (self.part, self.pool_views[index]),
        ):
            if metadata is not None:
                kernel.run(query, *views, output, metadata, layer.impl.scale, key, value)


class DeviceSelfDraft:
    """`drafting.drafter.TargetForward` over a vLLM model runner on a device.

    Args:
        state: the model runner, whose caches must be bound to the backend.
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
            # All ranks or none must run the target, and each rank learns lower bounds at its own
            # time.
            most = self.state.max_model_len
            lens = [
                min(n, most)
                for n, d in zip(history.max_context_lens, history.is_drafted, strict=True)
                if d
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
        """Runs the target's forward on anchors behind contexts of `lens` tokens."""
        # Anchors and lengths of requests without a draft may be anything.
        ids = anchors.clamp(0, self.state.vocab_size - 1).to(torch.int32)
        positions = lens.clamp(0, self.state.max_model_len - 1)
        layers = dict.fromkeys(self.layer_index, attention)
        hidden, aux = self.state.forward(ids, positions, layers, list(rows))
        return hidden[: len(ids)], aux[0][: len(ids)]
