# SPDX-License-Identifier: Apache-2.0
"""What the runner needs of a device to verify trees: rows, compaction, draft caches.

The runner mixin is the same everywhere; everything that differs between devices is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.drafter import DraftCache
from vllm_specplug.kernels import TreeLayer, compact_kv, to_device, tree_metadata
from vllm_specplug.kvcache import path_moves
from vllm_specplug.vllm_attention.tree_rows import (
    CpuTreeRows,
    TreeRows,
    layout_key,
    put_rows,
    rehearsed_rows,
)
from vllm_specplug.vllm_v1.runner_state import RunnerState
from vllm_specplug.vllm_worker.cache_groups import CacheGroup, target_layouts
from vllm_specplug.vllm_worker.draft_cache import BlockTable, DraftKVLayer, PagedDraftCache
from vllm_specplug.vllm_worker.step import StepRequest, TreeStep
from vllm_specplug.vllm_worker.window_cache import HostMemory

_NO_NODES = np.empty(0, dtype=np.int32)


class TreeBackend(ABC):
    """One device's way of verifying trees."""

    reads_fp8 = False
    """Whether its kernels read caches of 8 bits."""
    rehearsed_rows = 0
    """Rows of the trees that the rows of a forward of dummies are; 0 where they are vLLM's."""

    @abstractmethod
    def bind(self, groups: list[CacheGroup]) -> None:
        """Takes the target's caches."""

    @abstractmethod
    def tree_rows(
        self, members: Sequence[tuple[int, StepRequest]], covers_batch: bool, common: Any
    ) -> TreeRows:
        """The rows of `members` (index in the batch, request) for the attention backends.

        `common` is vLLM's common attention metadata of the step.
        """

    @abstractmethod
    def compact(self, step: TreeStep, state: RunnerState) -> None:
        """Makes accepted paths contiguous in all layers; `state` has the block tables."""

    @abstractmethod
    def draft_cache(
        self, layers: list[DraftKVLayer], block_table: BlockTable, scale: float
    ) -> DraftCache:
        """The drafter's pages."""

    def warm_up(self) -> None:  # noqa: B027 - optional, not abstract
        """Compiles what a step would otherwise compile, after `bind`."""

    def captures_trees(self) -> bool:
        """Whether uniform batches of trees are captured as full graphs."""
        return False

    def attach(
        self,
        attn_metadata: Any,
        step: TreeStep,
        common: Any,
        *,
        for_capture: bool = False,
        padded_requests: int | None = None,
    ) -> None:
        """Puts the step's tree rows on vLLM's attention metadata, where there are any.

        Args:
            common: vLLM's common metadata; without padding, except for a capture.
            padded_requests: requests of the graph the step runs in; None where it is not padded.
        """
        if for_capture or not step.has_trees:
            return
        covers = all(r.decodes for r in step.requests)
        members = [
            (i, r)
            for i, r in enumerate(step.requests)
            if (r.decodes if covers else not r.is_linear)
        ]
        put_rows(attn_metadata, self.tree_rows(members, covers, common))

    def set_positions(self, positions: torch.Tensor, step: TreeStep) -> None:
        """Rotary positions of tree nodes: the root's plus depth, on every axis.

        `positions` int64 [T], linear; [axes, T] of targets with M-RoPE, where text has one number
        on all axes, which differs from the token's behind an image.
        """
        rows: list[np.ndarray] = []
        shifts: list[np.ndarray] = []
        for r in step.requests:
            if not r.is_linear:
                assert r.tree is not None
                rows.append(np.arange(r.root_row + 1, r.end_row))
                shifts.append(r.tree.depths.astype(np.int64) - np.arange(1, r.tree.num_nodes + 1))
        if rows:
            index = to_device(np.concatenate(rows), positions.device)
            depths = to_device(np.concatenate(shifts), positions.device)
            positions[..., index] += depths.to(positions.dtype)


class CpuTreeBackend(HostMemory, TreeBackend):
    """The compiled CPU kernels over vLLM's CPU cache.

    Args:
        plain_rows: whether rows without drafts are attended by them too.
    """

    reads_fp8 = True

    def __init__(self, plain_rows: bool = False) -> None:
        self.plain_rows = plain_rows

    def bind(self, groups: list[CacheGroup]) -> None:
        self.groups = [(g.index, g.own_caches) for g in groups if g.own_caches]
        self.layouts = target_layouts(groups)
        self.layers: dict[Any, TreeLayer] = {}

    def attach(
        self,
        attn_metadata: Any,
        step: TreeStep,
        common: Any,
        *,
        for_capture: bool = False,
        padded_requests: int | None = None,
    ) -> None:
        """As the others; rows of dummies where a forward rehearses trees, and plain rows."""
        if self.rehearsed_rows:
            longest = int(common.seq_lens.max())
            metadata = rehearsed_rows(
                common.num_actual_tokens, self.rehearsed_rows, longest, common.block_table_tensor
            )
            put_rows(attn_metadata, CpuTreeRows(metadata, self.layouts, True, self.layers))
        elif not self.plain_rows:
            super().attach(attn_metadata, step, common, for_capture=for_capture)
        else:
            # Where drafts are not ours the root alone; what follows it is vLLM's.
            members = [
                (i, r)
                for i, r in enumerate(step.requests)
                if r.first_row == r.root_row or not r.is_linear
            ]
            if members:
                covers = all(r.decodes for r in step.requests)
                put_rows(attn_metadata, self.tree_rows(members, covers, common))

    def tree_rows(
        self, members: Sequence[tuple[int, StepRequest]], covers_batch: bool, common: Any
    ) -> TreeRows:
        metadata = tree_metadata(
            req_indices=[i for i, _ in members],
            row_starts=[r.root_row for _, r in members],
            context_lens=[r.context_len for _, r in members],
            parents=[_NO_NODES if r.tree is None else r.tree.parent_indices for _, r in members],
            block_table=common.block_table_tensor,
        )
        has_trees = any(not r.is_linear for _, r in members)
        return CpuTreeRows(metadata, self.layouts, covers_batch, self.layers, has_trees)

    def compact(self, step: TreeStep, state: RunnerState) -> None:
        moved = [(i, r) for i, r in enumerate(step.requests) if r.accepted_path and not r.is_linear]
        for index, caches in self.groups if moved else ():
            block_ids, layout = state.block_ids(index), self.layouts[layout_key(caches[0])]
            paths = ((r.accepted_path, r.context_len, block_ids[i]) for i, r in moved)
            sources, targets = path_moves(paths, layout.block_size)
            if len(sources):
                compact_kv(caches, torch.from_numpy(sources), torch.from_numpy(targets), layout)

    def draft_cache(
        self, layers: list[DraftKVLayer], block_table: BlockTable, scale: float
    ) -> DraftCache:
        return PagedDraftCache(layers, block_table, scale)
