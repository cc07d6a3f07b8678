# SPDX-License-Identifier: Apache-2.0
"""The call every CUDA tree attention kernel answers: its tensors, and the promise about them.

Letters: R trees, M tree rows (roots and nodes of all trees), T query rows of the step, B requests
in the block table, Hq/Hkv heads, G = Hq / Hkv, Dh head size, W 64-bit words per mask row.

    tree_attn_<kernel>(
        query,          # [T, Hq, Dh]
        key_cache,      # [num_blocks, block_size, Hkv, Dh]
        value_cache,    # [num_blocks, block_size, Hkv, Dh]
        output,         # [T, Hq, Dh], written in place
        meta,           # CudaTreeMetadata
        scale,          # float, multiplies query times key
        tail_key=None,    # [M, Hkv, Dh]
        tail_value=None,  # [M, Hkv, Dh]
    ) -> None

Row i of tree r (query row `row_start[r] + i`) attends cache slots [0, context_lens[r]) of request
`req_indices[r]` and those rows j of its own tree that its mask names. K/V of row j lie in the
cache at slot context_lens[r] + j, or, when both tails are given, in row mask_start[r] + j of
these; then no cache slot past the context is used. Query head h reads KV head h // G.

Strides are arbitrary multiples of 16 bytes, except that the last one is 1 (element) everywhere
and that plan, parent_rows and block_table are contiguous. vLLM's FlashAttention cache of 0.32 is
logically [num_blocks, Hkv, block_size, 2 * Dh], K before V in the last dimension;
`kv_cache.transpose(1, 2).split(Dh, -1)` gives the two views, whatever the order in memory.

What a kernel promises:
  - no host synchronisation and no allocation that a CUDA graph would not replay: shapes of the
    step come from `plan`, host integers are upper bounds that hold for every replay;
  - a tree of row_count 0 is skipped (its other entries may be anything), so a graph captured for
    R trees serves fewer;
  - rows of `output` that belong to no tree are not written, rows of prefill stay with the caller;
  - a slot that no row attends may hold anything, NaN too, but the pages named for slots
    [0, context_lens + row_count) must exist, except that entries of `block_table` past the last
    slot used are never followed;
  - float32 accumulation; the result differs from exact attention by rounding alone, for any
    number of splits;
  - parent_rows is not trusted to be a tree: an entry that does not precede its row ends the walk
    (the result is then unspecified, but the kernel returns).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

MaskKind = Literal["tree", "full"]

# Rows of `CudaTreeMetadata.plan`, in the order of TreeAttnMetadata.plan.
PLAN_REQ, PLAN_ROW_START, PLAN_ROW_COUNT, PLAN_CONTEXT, PLAN_MASK_START = range(5)
PLAN_ROWS = 5

# Rows of the largest tree a kernel need take: the root and 256 nodes.
MAX_TREE_ROWS = 257


@dataclass
class CudaTreeMetadata:
    """A batch of trees as the CUDA kernels take it; tensors on the device, kept across steps.

    The tensors are buffers: the caller writes each step's values into them, and a captured graph
    reads them again. The integers are fixed at capture.
    """

    # [5, R] int32: req_indices, row_start, row_count, context_lens, mask_start, as in
    # `TreeAttnMetadata`; mask_start is the exclusive prefix sum of row_count
    plan: torch.Tensor
    # [M] int32: row within its own tree of each row's parent; -1 for a tree's row 0. A causal
    # block is the chain i - 1. At mask_start[r] + i.
    parent_rows: torch.Tensor
    # [B, max_blocks] int32
    block_table: torch.Tensor
    # upper bound of row_count
    max_rows: int
    # upper bound of context_lens, for the number of splits; a larger context is still correct
    max_context: int
    # "tree": ancestors and self by parent_rows; "full": every row attends all rows of its tree,
    # and parent_rows is not read
    mask_kind: MaskKind = "tree"
    # [M, W] int64, bit j % 64 of word j // 64 of row i set when row i attends row j; for kernels
    # that do not build it from parent_rows themselves
    words: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.plan.ndim == 2 and self.plan.shape[0] == PLAN_ROWS, self.plan.shape
        for tensor in (self.plan, self.parent_rows, self.block_table):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert self.parent_rows.ndim == 1 and self.block_table.ndim == 2
        assert self.mask_kind in ("tree", "full"), self.mask_kind
        assert 0 <= self.max_rows <= MAX_TREE_ROWS, self.max_rows

    @property
    def num_trees(self) -> int:
        """R, trees and the skipped places among them."""
        return self.plan.shape[1]
