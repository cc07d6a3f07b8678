# SPDX-License-Identifier: Apache-2.0
"""The description of the trees of an attention call, on any device.

Letters: R trees, M rows of all trees (roots and nodes), W 64-bit words per mask row,
B requests in the block table.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from .cuda_contract import MAX_TREE_ROWS, PLAN_CONTEXT, PLAN_ROW_COUNT, PLAN_ROWS
from .masks import ancestor_words, causal_words, full_words

MaskKind = Literal["tree", "full"]


@dataclass
class TreeAttnMetadata:
    """A batch of trees over a paged KV cache; tensors on the device of the call.

    A tree occupies `row_count` consecutive query rows, root first (or the first slot of a draft
    block). Its context is slots [0, context_len) of its request; its own K/V follow at slots
    context_len + j, unless the call has a dense tail.

    CPU kernels read the mask from `mask_words`, CUDA kernels from `parent_rows`. On CUDA
    `mask_words` is a buffer for the words that Triton kernels compute from the parents.

    On CUDA the tensors are kept across steps: the caller writes each step's values into them, and
    a captured graph reads them again. The integers are fixed at capture.
    """

    # [5, R] int32: row of block_table, first query row, rows (1 + nodes), KV slots before the
    # first row, and the first row of the mask: the exclusive prefix sum of rows
    plan: torch.Tensor
    # [B, max_blocks] int32
    block_table: torch.Tensor
    # upper bound of the rows of a tree
    max_rows: int
    # upper bound of a context, for the number of splits; a larger context is still correct
    max_context: int
    # [M, W] int64: bit j % 64 of word j // 64 of row i is set when row i attends row j of its tree
    mask_words: torch.Tensor | None = None
    # [M] int32: row within its own tree of each row's parent; -1 for a tree's row 0. A causal
    # block is the chain i - 1
    parent_rows: torch.Tensor | None = None
    # "tree": by the words or the parents; "full": every row attends all rows of its tree, and CUDA
    # kernels read neither
    mask_kind: MaskKind = "tree"
    # [R + 1] int32: first query row of each tree and the end of the last, where tree r belongs to
    # row r of the block table and follows tree r - 1 without a gap; None elsewhere
    query_starts: torch.Tensor | None = None
    # schedules that the first layer computes from the plan for the others, by the shape of their
    # attention; must be cleared if the plan changes
    schedules: dict[Any, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.plan.dtype == torch.int32, self.plan.dtype
        assert self.plan.ndim == 2 and self.plan.shape[0] == PLAN_ROWS, self.plan.shape
        assert self.block_table.dtype == torch.int32 and self.block_table.ndim == 2
        assert self.mask_kind in ("tree", "full"), self.mask_kind
        assert self.mask_words is not None or self.parent_rows is not None, "no mask"
        if self.mask_words is not None:
            assert self.mask_words.dtype == torch.int64, self.mask_words.dtype
        if self.parent_rows is not None:
            assert self.parent_rows.dtype == torch.int32 and self.parent_rows.ndim == 1
            for tensor in (self.plan, self.parent_rows, self.block_table):
                assert tensor.is_contiguous()
            assert 0 <= self.max_rows <= MAX_TREE_ROWS, self.max_rows

    @classmethod
    def build(
        cls,
        req_indices: Sequence[int],
        row_start: Sequence[int],
        row_count: Sequence[int],
        context_lens: Sequence[int],
        # [M, W] int64
        mask_words: torch.Tensor,
        # [B, max_blocks]
        block_table: torch.Tensor,
    ) -> TreeAttnMetadata:
        """Makes metadata on the CPU from sequences of length R."""
        plan = plan_columns(req_indices, row_start, row_count, context_lens)
        return cls(
            torch.from_numpy(plan),
            block_table.to(torch.int32),
            max_rows=int(plan[PLAN_ROW_COUNT].max(initial=0)),
            max_context=int(plan[PLAN_CONTEXT].max(initial=0)),
            mask_words=mask_words,
        )

    @property
    def num_trees(self) -> int:
        """R including skipped columns of the plan."""
        return self.plan.shape[1]

    @property
    def num_rows(self) -> int:
        """M, the rows of the mask."""
        mask = self.mask_words if self.parent_rows is None else self.parent_rows
        assert mask is not None
        return mask.shape[0]


def plan_columns(
    # each [R]
    req_indices: Sequence[int],
    row_start: Sequence[int],
    row_count: Sequence[int],
    context_lens: Sequence[int],
) -> npt.NDArray[np.int32]:
    """Returns `TreeAttnMetadata.plan` of R trees."""
    plan = np.zeros((PLAN_ROWS, len(row_count)), dtype=np.int32)
    plan[:4] = req_indices, row_start, row_count, context_lens
    np.cumsum(plan[2, :-1], out=plan[4, 1:])
    return plan


def tree_metadata(
    req_indices: Sequence[int],
    row_starts: Sequence[int],
    context_lens: Sequence[int],
    parents: Sequence[npt.NDArray[Any]],
    # [B, max_blocks] int32
    block_table: torch.Tensor,
) -> TreeAttnMetadata:
    """Returns metadata to verify R trees: rows of tree r are its root and its nodes.

    Args:
        req_indices: [R] rows of block_table.
        row_starts: [R] query row of each root.
        context_lens: [R] KV slots before each root.
        parents: R int32 arrays, see `ancestor_words`.
        block_table: shared by all requests of the step.
    """
    counts = [len(p) + 1 for p in parents]
    return TreeAttnMetadata.build(
        req_indices, row_starts, counts, context_lens, ancestor_words(parents), block_table
    )


def single_row_metadata(
    # int32 [M]
    table_rows: torch.Tensor,
    # [M]
    positions: torch.Tensor,
    # int32 [M]: 1, or 0 to skip the row
    counts: torch.Tensor,
    # [B, max_blocks] int32
    block_table: torch.Tensor,
    max_context: int,
) -> TreeAttnMetadata:
    """Returns metadata of M rows that attend the slots before their position, and themselves."""
    rows = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    return TreeAttnMetadata(
        torch.stack([table_rows, rows, counts, positions.int(), rows]),
        block_table,
        max_rows=1,
        max_context=max_context,
        mask_words=torch.ones((len(rows), 1), dtype=torch.int64, device=positions.device),
        parent_rows=torch.full_like(rows, -1),
    )


def block_metadata(
    req_indices: Sequence[int],
    context_lens: Sequence[int],
    rows: int,
    causal: bool,
    # [B, max_blocks] int32
    block_table: torch.Tensor,
) -> TreeAttnMetadata:
    """Returns metadata for drafting: R blocks of `rows` rows, one after the other in the query.

    Within its block a row attends the rows before it (causal) or all rows.
    """
    num_blocks = len(req_indices)
    counts = [rows] * num_blocks
    words = _block_words(num_blocks, rows, causal)
    starts = range(0, rows * num_blocks, rows)
    return TreeAttnMetadata.build(req_indices, starts, counts, context_lens, words, block_table)


# Few entries: a head has one block size, and a server few batch sizes.
@functools.lru_cache(maxsize=32)
def _block_words(num_blocks: int, rows: int, causal: bool) -> torch.Tensor:
    """Returns int64 [num_blocks * rows, W], which is never written."""
    return (causal_words if causal else full_words)([rows] * num_blocks)
