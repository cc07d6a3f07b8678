# SPDX-License-Identifier: Apache-2.0
"""`self_draft` in a CUDA graph: draft forwards that choose no positions for a partial cache.

A graph holds the forward of requests whose partial caches, if they have one, are already chosen.
Before a replay the host stores new tokens and writes each request's region to the graph's memory.
A forward that chooses positions runs without a graph: in a graph, every replay would compute scores
and their top-k in every layer, for the maximum number of requests and the longest context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.kernels import pinned
from vllm_specplug.vllm_attention.tree_rows import DraftAttention
from vllm_specplug.vllm_worker.memory.device_partial_cache import Contexts, partial_of, single_rows

if TYPE_CHECKING:
    from vllm_specplug.vllm_worker.device_self_draft import DeviceSelfDraft


class GraphPartialAttention(DraftAttention):
    """Attention of a captured draft forward. The device holds each request's region."""

    def __init__(
        self,
        draft: DeviceSelfDraft,
        requests: DeviceRequests,
        # [B] int32 region of each request of the batch, -1 for those that read all of their context
        regions: torch.Tensor,
    ) -> None:
        assert requests.rows is not None
        self.draft = draft
        pool, tables = draft.pool, requests.rows
        # Requests without a budget attend only themselves.
        is_drafted = requests.budgets > 0
        own = regions[tables.long()]
        is_partial = (own >= 0) & is_drafted
        every = torch.arange(len(requests), dtype=torch.int32, device=own.device)
        lens = torch.where(is_drafted, requests.context_lens, 0).to(torch.int32)
        is_full = (~is_partial).to(torch.int32)
        columns = (tables.to(torch.int32), every, is_full, lens, every)
        most = draft.state.max_model_len
        self.reads = [(single_rows(columns, draft.rows.block_table(), most), draft.rows.views)]
        if pool.max_requests:
            budget = torch.full_like(lens, pool.budget)
            columns = (own.clamp_min(0), every, 1 - is_full, budget, every)
            part = single_rows(columns, pool.block_table, pool.budget)
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


class GraphSelfDraft:
    """The draft forwards of `draft` that graphs may hold."""

    def __init__(self, draft: DeviceSelfDraft) -> None:
        self.draft = draft
        state = draft.state
        # [B] region of each request of the batch, on the device and on the host
        self.regions = torch.full((state.max_requests,), -1, dtype=torch.int32, device=state.device)
        self._regions = np.full(state.max_requests, -1, np.int32)

    @property
    def is_possible(self) -> bool:
        """Whether graphs may hold the forward: on one rank, without LoRA adapters.

        The host sets adapters. Ranks read steps at different times, so that one would replay a
        forward while another launches it, and their all-reduces would not match.
        """
        state = self.draft.state
        parallel = state.vllm_config.parallel_config
        is_only_rank = parallel.world_size == 1 and parallel.data_parallel_size == 1
        return is_only_rank and state.runner.lora_config is None

    def prepare(self, requests: DeviceRequests) -> bool:
        """See `drafting.drafter.TargetForward.prepare`."""
        draft = self.draft
        contexts = Contexts.of(requests, draft.state.device)
        partial = partial_of(contexts, draft.pool.budget)
        if any(draft.pool.is_due(contexts, r) for r in partial):
            return False
        moves = draft.pool.advance(contexts, partial, draft.rows.block_table())
        self._send(len(requests), partial, [region.index for region in moves.regions])
        return True

    def _send(self, count: int, partial: Sequence[int], regions: Sequence[int]) -> None:
        sent = np.full(count, -1, np.int32)
        sent[list(partial)] = regions
        # Regions stay the same while no request starts, ends or outgrows the budget.
        if not np.array_equal(sent, self._regions[:count]):
            self._regions[:count] = sent
            self.regions[:count].copy_(pinned(sent, self.regions.device), non_blocking=True)

    def __call__(self, requests: DeviceRequests) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the forward; the host reads nothing."""
        attention = GraphPartialAttention(self.draft, requests, self.regions)
        return self.draft.run(
            attention, requests.anchors, requests.context_lens.long(), range(len(requests))
        )
