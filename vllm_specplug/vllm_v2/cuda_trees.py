# SPDX-License-Identifier: Apache-2.0
"""Verifying trees on CUDA in vLLM's V2 runner: trees that the host does not know.

Which rows there are is known on the host; parents, contexts and accepted paths are tensors that
only kernels read. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from vllm_specplug.kernels import TreeAttnMetadata
from vllm_specplug.vllm_attention.device_states import DeviceStateStep
from vllm_specplug.vllm_attention.tree_rows import DeviceTreeRows, TreeRows
from vllm_specplug.vllm_v2.backend import TreeBackend, step_plan
from vllm_specplug.vllm_v2.device_trees import StepTrees, Walk
from vllm_specplug.vllm_v2.graph_trees import GraphTrees
from vllm_specplug.vllm_worker.cuda_backend import CudaKernels
from vllm_specplug.vllm_worker.step_clock import DeviceClock, StepClock


def parent_rows(trees: StepTrees) -> torch.Tensor:
    """`TreeAttnMetadata.parent_rows` int32 [M]. What no walk can reach hangs below its root."""
    rows = trees.rows
    above = trees.above - rows.starts[rows.row_requests]
    return torch.where(rows.places == 0, -1, above).to(torch.int32)


class CudaTreeBackend(CudaKernels, TreeBackend):
    """`CudaKernels` for trees that are tensors."""

    is_host = False
    state_step = DeviceStateStep
    # The running step's by KV cache group, each int32 [R, blocks].
    block_tables: Sequence[torch.Tensor]

    def step_clock(self) -> StepClock:
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))

    def tree_rows(self, trees: StepTrees, block_tables: Sequence[torch.Tensor]) -> TreeRows:
        rows = trees.rows
        self.block_tables = block_tables
        device = rows.places.device
        words = (len(rows.places), -(-rows.max_rows // 64))
        metadata = TreeAttnMetadata(
            step_plan(trees),
            # Each layer brings its own.
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
        """What graphs of whole forwards read. Made before the first of them is captured."""
        return GraphTrees(self.limits, self.device)

    def graph_rows(
        self, trees: StepTrees | None, input_batch: Any, block_tables: Sequence[torch.Tensor]
    ) -> TreeRows:
        self.block_tables = block_tables
        metadata = self.graph_trees.fill(
            trees,
            input_batch.query_start_loc,
            input_batch.seq_lens,
            block_tables[0],
            input_batch.num_tokens_after_padding,
        )
        self.fill_words(metadata)
        return DeviceTreeRows(metadata, self.kernel.run, self.views, covers_batch=True)

    def compact(self, trees: StepTrees, walk: Walk, slot_mappings: torch.Tensor) -> None:
        from vllm_specplug.kernels.kv_compact_triton import compact_paths_triton

        rows = trees.rows
        # Past a path's end the kernel reads nothing.
        nodes = walk.path_rows[:, 1:] - (rows.starts[:-1, None] + 1)
        paths = nodes.to(torch.int32)
        requests = torch.arange(len(walk.lengths), dtype=torch.int32, device=nodes.device)
        for index, layers in self.groups:
            table = self.block_tables[index]
            compact_paths_triton(layers, paths, walk.lengths, rows.contexts, requests, table)
