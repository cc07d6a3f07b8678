# SPDX-License-Identifier: Apache-2.0
"""What each device does with a step's trees: attention rows, compaction and draft caches.

The runner mixin is the same on all devices. Everything that differs between devices is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.caches import (
    DraftCache,
    DraftWindow,
    PartialCacheSpec,
    TargetCache,
    TargetCacheSpec,
    TargetForward,
    WindowSpec,
)
from vllm_specplug.kernels import TreeAttnMetadata, TreeLayer, copy_kv, tree_metadata
from vllm_specplug.tree.step_trees import StepTrees, Walk, ancestor_words, path_moves
from vllm_specplug.vllm_attention.state_rows import StateStep
from vllm_specplug.vllm_attention.tree_rows import (
    CpuTreeRows,
    TreeRows,
    layout_key,
    put_rows,
    warmup_rows,
)
from vllm_specplug.vllm_worker.cost.step_clock import StepClock
from vllm_specplug.vllm_worker.memory.cache_groups import CacheGroup, target_layouts
from vllm_specplug.vllm_worker.memory.draft_cache import BlockTable, DraftKVLayer, PagedDraftCache
from vllm_specplug.vllm_worker.memory.window_cache import PagedTargetCache, WindowCache
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.self_draft import SelfDraft

_NO_NODES = np.empty(0, np.int32)


class TreeBackend(ABC):
    """One device's way of verifying trees."""

    is_host = False
    """Whether the device shares the host's memory, so that the host waits for nothing."""
    state_step: type[StateStep] = StateStep
    """The class that computes a step's trees in layers with a recurrent state."""
    warmup_rows = 0
    """Rows per tree in a dummy forward; 0 where vLLM attends the rows of dummies."""
    block_tables: Sequence[torch.Tensor]
    """For each KV cache group, int32 [S, blocks] by request slot. Compaction on CUDA reads it."""

    @abstractmethod
    def step_clock(self) -> StepClock:
        """Returns the clock that times the steps of this device."""

    @abstractmethod
    def bind(self, groups: list[CacheGroup]) -> None:
        """Stores the target's KV caches, once vLLM has allocated them."""

    @abstractmethod
    def tree_rows(self, trees: StepTrees, block_tables: Sequence[torch.Tensor]) -> TreeRows:
        """Returns the step's tree rows for the attention backends.

        `block_tables` has int32 [R, blocks] for each KV cache group.
        """

    def captures_trees(self) -> bool:
        """Whether full CUDA graphs hold the forward, tree attention included."""
        return False

    def graph_rows(
        self, trees: StepTrees | None, input_batch: Any, block_tables: Sequence[torch.Tensor]
    ) -> TreeRows:
        """Returns `tree_rows` for a full graph. Called only where `captures_trees` is true.

        Args:
            trees: None in a step without drafts, and in a dummy forward.
            input_batch: vLLM's batch, padded to the size that the graph was captured for.
        """
        raise NotImplementedError

    def attach(
        self,
        attn_metadata: dict[str, Any],
        input_batch: Any,
        trees: StepTrees | None,
        block_tables: Sequence[torch.Tensor],
    ) -> None:
        """Puts the step's tree rows on vLLM's attention metadata.

        `trees` is None in a step without drafts and in a dummy forward.
        """
        if trees is not None:
            put_rows(attn_metadata, self.tree_rows(trees, block_tables))

    @abstractmethod
    def compact(self, trees: StepTrees, walk: Walk, slot_mappings: torch.Tensor) -> None:
        """Moves the accepted paths into contiguous cache slots, in all layers.

        `slot_mappings` is int64 [groups, T].
        """

    @abstractmethod
    def draft_cache(
        self, layers: list[DraftKVLayer], block_table: BlockTable, scale: float
    ) -> DraftCache:
        """Returns the drafter's view of its layers' pages."""

    @abstractmethod
    def draft_window(self, spec: WindowSpec, state: RunnerView) -> DraftWindow:
        """Returns the memory for the drafter's own keys and values of recent tokens."""

    @abstractmethod
    def target_cache(
        self, kv_cache: torch.Tensor, block_table: BlockTable, spec: TargetCacheSpec
    ) -> TargetCache:
        """Returns the cache of one target layer as drafts attend it."""

    @abstractmethod
    def self_draft(self, state: RunnerView, spec: PartialCacheSpec) -> TargetForward:
        """Returns the forward that runs the target as its own draft model."""


def step_plan(trees: StepTrees) -> torch.Tensor:
    """Returns `TreeAttnMetadata.plan` int32 [5, R]. A request without drafts is a tree of one row,
    its root."""
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
    """The compiled CPU kernels over vLLM's CPU cache.

    Args:
        plain_rows: whether these kernels also attend rows without drafts.
    """

    is_host = True

    def __init__(self, plain_rows: bool = False) -> None:
        self.plain_rows = plain_rows

    def step_clock(self) -> StepClock:
        return StepClock()

    def bind(self, groups: list[CacheGroup]) -> None:
        self.groups = [(g.index, g.own_caches) for g in groups if g.own_caches]
        self.layouts = target_layouts(groups)
        self.layers: dict[Any, TreeLayer] = {}

    def tree_rows(self, trees: StepTrees, block_tables: Sequence[torch.Tensor]) -> TreeRows:
        # Each layer brings its own table.
        metadata = TreeAttnMetadata(
            step_plan(trees),
            block_tables[0],
            max_rows=trees.rows.max_rows,
            max_context=trees.rows.max_context,
            mask_words=ancestor_words(trees),
        )
        return CpuTreeRows(
            metadata, self.layouts, trees.rows.covers_batch, self.layers
        )  # fmt: skip

    def attach(
        self,
        attn_metadata: dict[str, Any],
        input_batch: Any,
        trees: StepTrees | None,
        block_tables: Sequence[torch.Tensor],
    ) -> None:
        """See `TreeBackend.attach`. Also attaches tree rows to a dummy forward that calibration
        runs, and plain rows where `plain_rows` is set."""
        rows: TreeRows | None = None
        if trees is not None:
            rows = self._without_prompts(self.tree_rows(trees, block_tables), input_batch)
        elif self.warmup_rows:
            longest = int(input_batch.seq_lens.max())
            metadata = warmup_rows(
                input_batch.num_tokens, self.warmup_rows, longest, block_tables[0]
            )
            rows = CpuTreeRows(metadata, self.layouts, True, self.layers)
        elif self.plain_rows:
            rows = self._single_rows(input_batch, block_tables[0])
        if rows is not None:
            put_rows(attn_metadata, rows)

    def _without_prompts(self, rows: TreeRows, input_batch: Any) -> TreeRows:
        """Returns `rows` without prompts: vLLM attends these, as in steps without drafts."""
        assert isinstance(rows, CpuTreeRows)
        starts = input_batch.query_start_loc_np[: input_batch.num_reqs + 1]
        plan = rows.metadata.plan
        kept = torch.from_numpy(np.diff(starts) == 1) | (plan[2] > 1)
        if bool(kept.all()):
            return rows
        return replace(rows, metadata=replace(rows.metadata, plan=plan[:, kept].contiguous()))

    def _single_rows(self, input_batch: Any, block_table: torch.Tensor) -> TreeRows | None:
        """Returns the requests of one row in a step without drafts."""
        starts = input_batch.query_start_loc_np[: input_batch.num_reqs + 1]
        single = np.flatnonzero(np.diff(starts) == 1)
        if not len(single):
            return None
        contexts = input_batch.seq_lens[: input_batch.num_reqs].numpy()[single] - 1
        metadata = tree_metadata(
            req_indices=single.tolist(),
            row_starts=starts[single].tolist(),
            context_lens=contexts.tolist(),
            parents=[_NO_NODES] * len(single),
            block_table=block_table,
        )
        covers = len(single) == input_batch.num_reqs
        return CpuTreeRows(metadata, self.layouts, covers, self.layers, has_trees=False)

    def compact(self, trees: StepTrees, walk: Walk, slot_mappings: torch.Tensor) -> None:
        for index, caches in self.groups:
            # A slot whose source is its target costs the kernel a comparison.
            sources, targets = path_moves(trees, walk, slot_mappings[index])
            layout = self.layouts[layout_key(caches[0])]
            copy_kv(caches, caches, sources.view(1, 1, -1), targets.flatten(), layout)

    def draft_cache(
        self, layers: list[DraftKVLayer], block_table: BlockTable, scale: float
    ) -> DraftCache:
        return PagedDraftCache(layers, block_table, scale)

    def draft_window(self, spec: WindowSpec, state: RunnerView) -> WindowCache:
        return WindowCache(spec, state.max_requests, state.dtype)

    def target_cache(
        self, kv_cache: torch.Tensor, block_table: BlockTable, spec: TargetCacheSpec
    ) -> PagedTargetCache:
        return PagedTargetCache(kv_cache, block_table, spec)

    def self_draft(self, state: RunnerView, spec: PartialCacheSpec) -> TargetForward:
        return SelfDraft(state, spec)
