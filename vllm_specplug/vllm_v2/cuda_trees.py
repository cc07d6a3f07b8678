# SPDX-License-Identifier: Apache-2.0
"""Verification of trees on CUDA in vLLM's V2 runner.

The host knows how many rows each request has. Parents, contexts and accepted paths are tensors that
only kernels read. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from vllm_specplug.drafting.caches import (
    DraftCache,
    PartialCacheSpec,
    TargetCacheSpec,
    TargetForward,
    WindowSpec,
)
from vllm_specplug.kernels import TreeAttnMetadata
from vllm_specplug.tree import step_trees
from vllm_specplug.tree.step_trees import StepTrees, Walk
from vllm_specplug.vllm_attention.device_states import DeviceStateStep
from vllm_specplug.vllm_attention.tree_rows import DeviceTreeRows, TreeRows
from vllm_specplug.vllm_v2.backend import TreeBackend, step_plan
from vllm_specplug.vllm_v2.graph_trees import GraphTrees
from vllm_specplug.vllm_worker.cost.step_clock import DeviceClock, StepClock
from vllm_specplug.vllm_worker.cuda_kernels import CudaKernels
from vllm_specplug.vllm_worker.device_self_draft import DeviceSelfDraft
from vllm_specplug.vllm_worker.memory.device_draft_cache import CudaDraftCache
from vllm_specplug.vllm_worker.memory.device_window import DeviceWindowCache, PagedDeviceTargetCache
from vllm_specplug.vllm_worker.memory.draft_cache import BlockTable, DraftKVLayer
from vllm_specplug.vllm_worker.runner_view import RunnerView


def parent_rows(trees: StepTrees) -> torch.Tensor:
    """Returns `TreeAttnMetadata.parent_rows` int32 [M]. Unreachable rows are children of their
    root."""
    rows = trees.rows
    above = trees.above - rows.starts[rows.row_requests]
    return torch.where(rows.local_pos == 0, -1, above).to(torch.int32)


class CudaTreeBackend(CudaKernels, TreeBackend):
    """`CudaKernels` for trees that are tensors."""

    is_host = False
    state_step = DeviceStateStep

    def step_clock(self) -> StepClock:
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))

    def run_every_variant(self, synchronize: Callable[[], None]) -> None:
        super().run_every_variant(synchronize)
        step_trees.warm_up(self.limits.tree_rows - 1, self.device)
        if self.captures_trees():
            self.graph_trees.warm_up()
        synchronize()

    def tree_rows(self, trees: StepTrees, block_tables: Sequence[torch.Tensor]) -> TreeRows:
        rows = trees.rows
        device = rows.query_rows.device
        words = (len(rows.query_rows), -(-rows.max_rows // 64))
        metadata = TreeAttnMetadata(
            step_plan(trees),
            # Only a default: each layer passes its own block table.
            block_tables[0],
            max_rows=rows.max_rows,
            max_context=rows.max_context,
            mask_words=torch.empty(words, dtype=torch.int64, device=device),
            parent_rows=parent_rows(trees),
            query_starts=rows.starts if rows.covers_batch else None,
        )
        self.fill_words(metadata)
        return DeviceTreeRows(metadata, self.kernel.run, self.views, rows.covers_batch)

    @cached_property
    def graph_trees(self) -> GraphTrees:
        """The memory that full graphs read. Made before the first one is captured."""
        return GraphTrees(self.limits, self.device)

    def graph_rows(
        self, trees: StepTrees | None, input_batch: Any, block_tables: Sequence[torch.Tensor]
    ) -> TreeRows:
        metadata = self.graph_trees.fill(
            trees,
            input_batch.query_start_loc,
            input_batch.seq_lens,
            block_tables[0],
            input_batch.num_tokens_after_padding,
            input_batch.max_query_len,
        )
        self.fill_words(metadata)
        return DeviceTreeRows(metadata, self.kernel.run, self.views, covers_batch=True)

    # -- what drafters keep -------------------------------------------------------------------

    def draft_cache(
        self, layers: list[DraftKVLayer], block_table: BlockTable, scale: float
    ) -> DraftCache:
        return CudaDraftCache(self, layers, block_table, scale)

    def draft_window(self, spec: WindowSpec, state: RunnerView) -> DeviceWindowCache:
        return DeviceWindowCache(self, spec, state.max_requests, state.dtype)

    def target_cache(
        self, kv_cache: torch.Tensor, block_table: BlockTable, spec: TargetCacheSpec
    ) -> PagedDeviceTargetCache:
        return PagedDeviceTargetCache(self, kv_cache, block_table, spec)

    def self_draft(self, state: RunnerView, spec: PartialCacheSpec) -> TargetForward:
        draft = DeviceSelfDraft(state, spec, self)
        if self.device.type == "cuda":
            draft.pool.warm_up(self.num_heads, self.dtype)
        return draft

    def compact(self, trees: StepTrees, walk: Walk, slot_mappings: torch.Tensor) -> None:
        from vllm_specplug.kernels.kv_compact_triton import compact_paths_triton

        assert walk.nodes is not None
        contexts, slots = trees.rows.contexts, trees.rows.slots
        for index, layers in self.groups:
            table = self.block_tables[index]
            compact_paths_triton(layers, walk.nodes, walk.lengths, contexts, slots, table)
