# SPDX-License-Identifier: Apache-2.0
"""A step's trees where graphs of whole forwards look for them.

A graph repeats kernels over the addresses, launch grids and host integers of its capture. It is
captured for a number of query rows and of requests, vLLM pads a step of ragged trees to one of
these, and every step writes its trees to the same memory before the graph is replayed. All rows of
such a step are tree rows: a request without drafts is a root, and what is no tree is a chain.
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
from vllm_specplug.vllm_v2.device_trees import StepTrees
from vllm_specplug.vllm_worker.cuda_backend import StepLimits


def row_parents(
    trees: StepTrees | None,
    # [R + 1] int32 first query row of each request, and their end
    starts: torch.Tensor,
    num_rows: int,
) -> torch.Tensor:
    """`TreeAttnMetadata.parent_rows` int32 [T] of all query rows: trees below chains that end in
    their roots. Without trees every request is a chain. Rows past the last request's hold anything.
    """
    rows = torch.arange(num_rows, dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(starts[1:], rows, right=True).clamp_max(len(starts) - 2)
    chain = rows - starts[request] - 1
    if trees is None:
        return chain
    at = trees.rows.query_rows
    above = at[trees.above].to(torch.int32) - starts[trees.rows.row_requests]
    chain[at] = torch.where(trees.rows.places == 0, chain[at], above)
    return chain


class GraphTrees:
    """Memory of one step's trees that captured graphs read again and again.

    Args:
        limits: the largest step; its context and tree size are those that graphs are captured for.
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

    def fill(
        self,
        trees: StepTrees | None,
        # [P + 1] int32, and [P] int32: tokens at the end of the forward
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        num_rows: int,
    ) -> TreeAttnMetadata:
        """The metadata of a step of P requests and `num_rows` query rows, both padded to what a
        graph was captured for. No host synchronisation.

        A request of no rows is padding: kernels skip it, and no row follows the last request's.
        """
        places = len(seq_lens)
        starts = self.starts[: places + 1]
        starts.copy_(query_starts)
        counts = starts[1:] - starts[:-1]
        # Not so in a capture, where vLLM's lengths may be shorter than its rows.
        contexts = (seq_lens - counts).clamp_min(0)
        # Its stride is the graph's number of requests.
        plan = self.plan[: PLAN_ROWS * places].view(PLAN_ROWS, places)
        first = starts[:-1]
        torch.stack([self.requests[:places], first, counts, contexts, first], out=plan)
        parents = self.parents[:num_rows]
        parents.copy_(row_parents(trees, starts, num_rows))
        return TreeAttnMetadata(
            plan,
            block_table,
            # Bounds of every step that the graph will serve.
            max_rows=self.limits.tree_rows,
            max_context=self.limits.context,
            mask_words=self.words[:num_rows],
            parent_rows=parents,
            query_starts=starts,
        )


def taking_ragged_steps(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ModelCudaGraphManager` whose full graphs take decoding requests of any number of rows.

    Seam: graphs_of_trees.
    """

    def make(*args: Any, **kwargs: Any) -> Any:
        manager = stock(*args, **{**kwargs, "varlen_decode": True})
        # vLLM takes the first candidate that fits, and captures the largest first.
        manager._candidates = {
            key: [one for desc in descs for one in by_requests(desc)]
            for key, descs in manager._candidates.items()
        }
        manager._capture_descs = {
            mode: [one for desc in descs for one in by_requests(desc)[::-1]]
            for mode, descs in manager._capture_descs.items()
        }
        return manager

    return make


# Of a graph's places to those of the next larger one of as many rows.
_MORE_PLACES = 4


def by_requests(desc: BatchExecutionDescriptor) -> list[BatchExecutionDescriptor]:
    """A graph of ragged steps, behind one of as few requests as its rows can be of and, where there
    may be many more, one of some more.

    vLLM's has a place for as many requests as it has rows, and launches of attention have blocks
    for the largest tree in each: 32 places for 257 rows of one tree are 2,880 blocks of attention
    and 66,000 of its merge in each layer, where two are 720 and 4,100.
    """
    if desc.cg_mode != CUDAGraphMode.FULL or not (desc.num_reqs and desc.max_query_len):
        return [desc]
    fewest = -(-desc.num_tokens // desc.max_query_len)
    some = [n for n in (fewest, _MORE_PLACES * fewest) if 2 * n <= desc.num_reqs]
    return [*(replace(desc, num_reqs=places) for places in some), desc]
