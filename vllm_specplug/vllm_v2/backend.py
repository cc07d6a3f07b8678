# SPDX-License-Identifier: Apache-2.0
"""What a device does with trees that are tensors: attention rows and compaction.

The runner mixin is the same everywhere; everything that differs between devices is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from vllm_specplug.kernels import TreeAttnMetadata, compact_kv
from vllm_specplug.vllm_attention.cpu import cpu_kv_layout
from vllm_specplug.vllm_attention.tree_rows import CpuTreeRows, TreeRows
from vllm_specplug.vllm_v2.device_trees import StepTrees, Walk, ancestor_words, path_moves
from vllm_specplug.vllm_worker.step_clock import HostClock, StepClock


class TreeBackend(ABC):
    """One device's way of verifying trees."""

    @abstractmethod
    def step_clock(self) -> StepClock:
        """What times the steps of this device."""

    @abstractmethod
    def bind(self, kv_caches: list[torch.Tensor]) -> None:
        """Takes the target's caches [num_blocks, Hkv, block_size, 2 * Dh], one per layer."""

    @abstractmethod
    def tree_rows(self, trees: StepTrees, block_table: torch.Tensor) -> TreeRows:
        """The step's rows for the attention backends; `block_table` int32 [R, blocks]."""

    @abstractmethod
    def compact(self, trees: StepTrees, walk: Walk, slot_mapping: torch.Tensor) -> None:
        """Makes accepted paths contiguous in all layers; `slot_mapping` int64 [T]."""


def step_plan(trees: StepTrees) -> torch.Tensor:
    """int32 [5, R], see `TreeAttnMetadata.plan`: every request is a tree, if only of its root."""
    rows = trees.rows
    first = rows.starts[:-1]
    return torch.stack(
        [
            torch.arange(len(first), dtype=torch.int32, device=first.device),
            rows.query_rows[first.long()].to(torch.int32),
            rows.starts[1:] - first,
            rows.contexts.to(torch.int32),
            first,
        ]
    )


class CpuTreeBackend(TreeBackend):
    """The compiled CPU kernels over vLLM's CPU cache."""

    def step_clock(self) -> StepClock:
        return HostClock()

    def bind(self, kv_caches: list[torch.Tensor]) -> None:
        self.kv_caches = kv_caches
        self.layout = cpu_kv_layout(kv_caches[0])

    def tree_rows(self, trees: StepTrees, block_table: torch.Tensor) -> TreeRows:
        metadata = TreeAttnMetadata(
            step_plan(trees),
            block_table,
            max_rows=trees.rows.max_rows,
            max_context=trees.rows.max_context,
            mask_words=ancestor_words(trees),
        )
        return CpuTreeRows(metadata, self.layout, trees.rows.covers_batch)

    def compact(self, trees: StepTrees, walk: Walk, slot_mapping: torch.Tensor) -> None:
        # Slots that stay where they are cost nothing in the kernel.
        sources, targets = path_moves(trees, walk, slot_mapping)
        compact_kv(self.kv_caches, sources.flatten(), targets.flatten(), self.layout)
