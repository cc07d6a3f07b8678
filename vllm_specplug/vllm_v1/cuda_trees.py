# SPDX-License-Identifier: Apache-2.0
"""Verifying trees on CUDA in vLLM's V1 runner: the host's trees, in buffers that outlive a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_specplug.kernels import to_device
from vllm_specplug.kernels.cuda_contract import MAX_TREE_ROWS
from vllm_specplug.vllm_attention.tree_rows import DeviceTreeRows, TreeRows
from vllm_specplug.vllm_v1.runner_state import RunnerState
from vllm_specplug.vllm_v1.tree_backend import TreeBackend, put_rows
from vllm_specplug.vllm_worker.cuda_backend import CudaKernels
from vllm_specplug.vllm_worker.step import StepRequest, TreeStep


def request_parent_rows(request: StepRequest) -> np.ndarray:
    """int32: every row of the request as a tree: a chain up to the root, then its nodes.

    Right for any request, also a prompt chunk or another drafter's tokens: those are a chain.
    """
    total = request.end_row - request.first_row
    rows = np.arange(-1, total - 1, dtype=np.int32)
    tree = request.tree
    if tree is not None and tree.num_nodes:
        root = request.root_row - request.first_row
        rows[root + 1 :] = tree.parent_indices + (root + 1)
    return rows


class CudaTreeBackend(CudaKernels, TreeBackend):
    """`CudaKernels` for trees that the host knows."""

    reads_fp8 = True

    def tree_rows(
        self, members: Sequence[tuple[int, StepRequest]], covers_batch: bool, common: Any
    ) -> TreeRows:
        metadata = self.buffers.fill(
            [i for i, _ in members],
            [r.root_row for _, r in members],
            [r.context_len for _, r in members],
            [_parent_rows(r) for _, r in members],
            common.block_table_tensor,
        )
        self.fill_words(metadata)
        return DeviceTreeRows(metadata, self.kernel.run, self.views, covers_batch)

    def compact(self, step: TreeStep, state: RunnerState) -> None:
        from vllm_specplug.kernels.kv_compact_triton import compact_paths_triton

        moved = [
            (i, r)
            for i, r in enumerate(step.requests)
            if r.accepted_path
            and not r.is_linear
            and r.accepted_path[-1] != len(r.accepted_path) - 1
        ]
        if not moved:
            return
        depth = max(len(r.accepted_path) for _, r in moved)
        # Columns: length, context, request, then the path.
        table = np.zeros((len(moved), 3 + depth), dtype=np.int32)
        for line, (i, r) in zip(table, moved, strict=True):
            line[:3] = len(r.accepted_path), r.context_len, i
            line[3 : 3 + len(r.accepted_path)] = r.accepted_path
        columns = to_device(np.ascontiguousarray(table.T), self.device)
        paths = columns[3:].t().contiguous()
        for index, layers in self.groups:
            compact_paths_triton(
                layers, paths, columns[0], columns[1], columns[2], state.block_table(index)
            )

    # -- full graphs --------------------------------------------------------------------------

    def attach(
        self,
        attn_metadata: Any,
        step: TreeStep,
        common: Any,
        *,
        for_capture: bool = False,
        padded_requests: int | None = None,
    ) -> None:
        """In a full graph every row of a uniform batch is a tree row: drafts that form no tree
        are a chain, which is one. Which batches run so is vLLM's choice: all requests bring
        `max_query_len` rows."""
        if not self.captures_trees() or not self._is_uniform(common):
            super().attach(attn_metadata, step, common, for_capture=for_capture)
            return
        requests = [] if for_capture else step.requests
        metadata = self.buffers.fill(
            range(len(requests)),
            [r.first_row for r in requests],
            [r.num_computed for r in requests],
            [request_parent_rows(r) for r in requests],
            common.block_table_tensor,
            # The stride of the plan as the graph was captured with it.
            places=padded_requests or common.num_reqs,
            max_rows=common.max_query_len,
            max_context=self.limits.context,
        )
        self.fill_words(metadata)
        put_rows(attn_metadata, DeviceTreeRows(metadata, self.kernel.run, self.views, True))

    def _is_uniform(self, common: Any) -> bool:
        rows = common.max_query_len
        return (
            1 < rows <= MAX_TREE_ROWS
            and rows == self.limits.tree_rows
            and common.num_actual_tokens == rows * common.num_reqs
        )


def _parent_rows(request: StepRequest) -> np.ndarray:
    """int32 [1 + N]: root and nodes of a request's tree."""
    assert request.tree is not None
    rows = np.empty(request.tree.num_nodes + 1, dtype=np.int32)
    rows[0] = -1
    rows[1:] = request.tree.parent_indices + 1
    return rows
