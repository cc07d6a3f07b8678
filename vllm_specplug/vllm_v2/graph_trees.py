# SPDX-License-Identifier: Apache-2.0
"""A step's trees in the memory that full CUDA graphs read.

A graph replays kernels with the addresses, launch grids and host integers of its capture. Each one
is captured for a number of query rows and a number of requests, and vLLM pads a step of ragged
trees to one of them. Every step writes its trees to the same memory before the replay. All rows of
such a step are tree rows: a request without drafts is a single root, and prompt rows are a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_specplug.kernels import TreeAttnMetadata
from vllm_specplug.kernels.cuda_contract import PLAN_ROWS
from vllm_specplug.tree import step_trees
from vllm_specplug.tree.step_trees import StepTrees
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits


def row_parents(
    trees: StepTrees | None,
    # [R + 1] int32 first query row of each request, and their end
    starts: torch.Tensor,
    num_rows: int,
) -> torch.Tensor:
    """Returns `TreeAttnMetadata.parent_rows` int32 [T] of all query rows.

    Each request is a chain that ends in the root of its tree. Without trees it is only a chain.
    Rows past the last request's are undefined.
    """
    rows = torch.arange(num_rows, dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(starts[1:], rows, right=True).clamp_max(len(starts) - 2)
    chain = rows - starts[request] - 1
    if trees is None:
        return chain
    at = trees.rows.query_rows
    above = at[trees.above].to(torch.int32) - starts[trees.rows.row_requests]
    chain[at] = torch.where(trees.rows.local_pos == 0, chain[at], above)
    return chain


class GraphTrees:
    """Memory of one step's trees that every replay of a captured graph reads.

    Args:
        limits: the largest step. Graphs are captured for its context and tree size.
    """

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self.limits = limits
        requests, words = limits.num_requests, -(-limits.tree_rows // 64)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.plan = torch.zeros(PLAN_ROWS * requests, **ints)
        self.starts = torch.zeros(requests + 1, **ints)
        self.parents = torch.zeros(limits.num_rows, **ints)
        self.words = torch.zeros((limits.num_rows, words), dtype=torch.int64, device=device)
        self.requests = torch.arange(requests, **ints)

    def warm_up(self) -> None:
        """Compiles the kernels that `fill` launches."""
        starts = torch.zeros_like(self.starts[:2])
        self.fill(None, starts, starts[:1], starts[None], 0, None)

    def fill(
        self,
        trees: StepTrees | None,
        # [P + 1] int32, and [P] int32: tokens at the end of the forward
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        num_rows: int,
        max_rows: int | None,
    ) -> TreeAttnMetadata:
        """Returns the metadata of a step. Does not synchronise with the host.

        P requests and `num_rows` query rows are padded to the sizes that a graph was captured for.
        `max_rows` bounds the rows of a request in this graph; None stands for the largest tree.
        Padding requests have no rows and come last; kernels skip them.
        """
        num_requests = len(seq_lens)
        starts = self.starts[: num_requests + 1]
        # The plan's stride is the graph's number of requests.
        plan = self.plan[: PLAN_ROWS * num_requests].view(PLAN_ROWS, num_requests)
        parents = self.parents[:num_rows]
        if step_trees.has_kernels(plan.device):
            from vllm_specplug.kernels.step_trees_triton import fill_plan_triton

            known = (self.starts, self.words, 0)
            if trees is not None:
                known = (trees.rows.starts, trees.above, len(trees.rows.slots))
            fill_plan_triton(
                query_starts, seq_lens, *known, plan, starts, parents, self.limits.tree_rows
            )
        else:
            starts.copy_(query_starts)
            counts = starts[1:] - starts[:-1]
            # Clamped for captures, in which vLLM's lengths may be shorter than the rows.
            contexts = (seq_lens - counts).clamp_min(0)
            first = starts[:-1]
            torch.stack([self.requests[:num_requests], first, counts, contexts, first], out=plan)
            parents.copy_(row_parents(trees, starts, num_rows))
        return TreeAttnMetadata(
            plan,
            block_table,
            # Bounds for every step that the graph will serve.
            max_rows=max_rows or self.limits.tree_rows,
            max_context=self.limits.context,
            mask_words=self.words[:num_rows],
            parent_rows=parents,
            query_starts=starts,
        )


def wrap_graph_manager(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `ModelCudaGraphManager`: its full graphs take decoding requests of any number of rows.

    Seam: tree_graphs.
    """

    def make(*args: Any, **kwargs: Any) -> Any:
        manager = stock(*args, **{**kwargs, "varlen_decode": True})
        _add_larger(manager)
        # vLLM dispatches to the first candidate that fits, and captures the largest one first.
        manager._candidates = {
            key: [one for desc in descs for one in narrower(desc)]
            for key, descs in manager._candidates.items()
        }
        manager._capture_descs = {
            mode: [one for desc in descs for one in narrower(desc)[::-1]]
            for mode, descs in manager._capture_descs.items()
        }
        _put_largest_first(manager._capture_descs)
        return manager

    return make


MAX_GRAPH_ROWS = 1024
"""Rows of the largest captured step with trees. vLLM's own sizes mostly end at 512, too few for 16
requests with trees of 63 nodes."""
_MIN_STEP_ROWS = 64
"""Minimum distance between these sizes, in rows."""


def _add_larger(manager: Any) -> None:
    """Adds graphs of full trees for as many requests as `MAX_GRAPH_ROWS` allows.

    Prompts keep vLLM's own sizes: padding them to larger ones would cost more than it gains.
    """
    captured = manager._capture_descs.get(CUDAGraphMode.FULL)
    if not captured:
        return
    rows = manager.decode_query_len
    scheduler = manager.vllm_config.scheduler_config
    most = min(MAX_GRAPH_ROWS, scheduler.max_num_batched_tokens, manager.max_num_reqs * rows)
    step = -(-_MIN_STEP_ROWS // rows) * rows
    largest = max(desc.num_tokens for desc in captured)
    sizes = {*range(step, most, step), most // rows * rows}
    for size in sorted(size for size in sizes if size > largest):
        for loras in manager.lora_capture_cases:
            requests = min(size, manager.max_num_reqs)
            desc = BatchExecutionDescriptor(
                CUDAGraphMode.FULL, size, requests, max_query_len=rows, num_active_loras=loras
            )
            captured.insert(0, desc)
            for count in range(largest + 1, size + 1):
                manager._candidates.setdefault((count, loras), []).append(desc)
        largest = size


def _put_largest_first(captured: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]) -> None:
    """Moves the largest full graph before the piecewise ones, which vLLM captures first.

    The first forward allocates the output buffers that all full graphs share.
    """
    full, pieces = (captured.get(m) for m in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE))
    if full and pieces and full[0].num_tokens > pieces[0].num_tokens:
        pieces.insert(0, full.pop(0))


_ROW_BOUNDS = (16, 64)
"""Rows per request that attention is captured for, besides the largest tree. With four query heads
per KV head, 16 rows fill one tile of the kernels."""


def narrower(desc: BatchExecutionDescriptor) -> list[BatchExecutionDescriptor]:
    """Returns graphs of as many rows as `desc` for smaller trees and fewer requests, then `desc`.

    A launch of attention has thread blocks for the largest tree in every request, and vLLM's graph
    has as many requests as rows. Captured for 32 requests, 257 rows of one tree take 2,880 blocks
    of attention and 66,000 of its merge in each layer; captured for two, 720 and 4,100.
    """
    if desc.cg_mode != CUDAGraphMode.FULL or not (desc.num_reqs and desc.max_query_len):
        return [desc]
    found = []
    for bound in (*(rows for rows in _ROW_BOUNDS if rows < desc.max_query_len), desc.max_query_len):
        fewest = -(-desc.num_tokens // bound)
        requests = [fewest] if 2 * fewest <= desc.num_reqs else []
        if fewest <= desc.num_reqs:
            requests.append(desc.num_reqs)
        found += [replace(desc, max_query_len=bound, num_reqs=n) for n in requests]
        if bound >= desc.num_tokens:
            # No request has more rows than the graph.
            break
    return found
