# SPDX-License-Identifier: Apache-2.0
"""What a tree attention call is told about its trees.

Letters: R trees, M rows of all trees (roots and nodes), W 64-bit words per mask row,
B requests in the block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

WORD_BITS = 64


@dataclass
class TreeAttnMetadata:
    """A batch of trees over a paged KV cache; all tensors on the CPU.

    A tree occupies `row_count` consecutive query rows, root first (or the first slot of a draft
    block). Its context is slots [0, context_len) of its request; its own K/V follow at slots
    context_len + j, unless the call brings a dense tail.
    """

    # [R] int32: row of block_table
    req_indices: torch.Tensor
    # [R] int32: first query row
    row_start: torch.Tensor
    # [R] int32: rows, 1 + nodes
    row_count: torch.Tensor
    # [R] int32: KV slots before the first row
    context_lens: torch.Tensor
    # [R] int32: exclusive prefix sum of row_count, the first row of mask_words
    mask_start: torch.Tensor
    # [M, W] int64: bit j % 64 of word j // 64 of row i is set when row i attends row j of its tree
    mask_words: torch.Tensor
    # [B, max_blocks] int32
    block_table: torch.Tensor
    # [5, R] int32: the five vectors above as the kernel takes them
    plan: torch.Tensor = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.plan is None:
            self.plan = torch.stack(
                [
                    self.req_indices,
                    self.row_start,
                    self.row_count,
                    self.context_lens,
                    self.mask_start,
                ]
            ).to(torch.int32)
        assert self.plan.shape == (5, self.num_trees), self.plan.shape
        assert self.mask_words.dtype == torch.int64, self.mask_words.dtype
        if self.block_table.dtype != torch.int32:
            self.block_table = self.block_table.to(torch.int32)

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
        """The same from plain sequences of length R; the cheapest way to make one."""
        num_trees = len(row_count)
        plan = np.empty((5, num_trees), dtype=np.int32)
        plan[0], plan[1], plan[2], plan[3] = req_indices, row_start, row_count, context_lens
        if num_trees:
            plan[4, 0] = 0
            np.cumsum(plan[2, :-1], out=plan[4, 1:])
        tensor = torch.from_numpy(plan)
        return cls(*tensor.unbind(0), mask_words, block_table, tensor)

    @property
    def num_trees(self) -> int:
        return self.row_count.numel()

    @property
    def num_rows(self) -> int:
        """M, the rows of all trees."""
        return self.mask_words.shape[0]


def tree_metadata(
    req_indices: Sequence[int],
    row_starts: Sequence[int],
    context_lens: Sequence[int],
    parents: Sequence[np.ndarray],
    # [B, max_blocks] int32
    block_table: torch.Tensor,
) -> TreeAttnMetadata:
    """Metadata to verify R trees: rows of tree r are its root and its nodes.

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


def block_metadata(
    req_indices: Sequence[int],
    context_lens: Sequence[int],
    rows: int,
    causal: bool,
    # [B, max_blocks] int32
    block_table: torch.Tensor,
) -> TreeAttnMetadata:
    """Metadata for drafting: R blocks of `rows` rows, one after the other in the query.

    Within its block a row attends the rows before it (causal) or all rows.
    """
    num_blocks = len(req_indices)
    counts = [rows] * num_blocks
    words = (causal_words if causal else full_words)(counts)
    starts = range(0, rows * num_blocks, rows)
    return TreeAttnMetadata.build(req_indices, starts, counts, context_lens, words, block_table)


def ancestor_words(parents: Sequence[np.ndarray]) -> torch.Tensor:
    """Ancestor masks of a batch of trees.

    Args:
        parents: one int32 array [N] a tree, `DraftTree.parent_indices` (-1 is the root); an empty
            array is a tree of the root alone.

    Returns:
        int64 [M, W] with M the sum of N + 1: row 0 of a tree is its root, and every row attends
        its ancestors and itself.

    Raises:
        ValueError: if a parent does not precede its child.
    """
    counts = np.fromiter((len(p) + 1 for p in parents), np.int32, len(parents))
    words = empty_words(counts)
    if len(parents):
        from . import dispatch

        flat = np.concatenate(parents).astype(np.int32, copy=False)
        dispatch.fill_ancestor_words(flat, counts, words)
    return words


def causal_words(row_counts: int | Sequence[int]) -> torch.Tensor:
    """Masks of chains: row i attends rows 0..i. int64 [M, W]; a count, or one count a tree."""
    return _words_of(row_counts, lambda i, n: i + 1)


def full_words(row_counts: int | Sequence[int]) -> torch.Tensor:
    """Masks of bidirectional blocks: every row attends all rows of its tree. int64 [M, W]."""
    return _words_of(row_counts, lambda i, n: np.full_like(i, n))


def empty_words(row_counts: np.ndarray) -> torch.Tensor:
    """Zeroed int64 [M, W] for trees of the given row counts."""
    widest = int(row_counts.max()) if len(row_counts) else 1
    return torch.zeros(int(row_counts.sum()), -(-widest // WORD_BITS), dtype=torch.int64)


def words_to_bool(
    # [M, W] int64
    words: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    """The first `columns` bits of every row as bool [M, columns]."""
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=columns, bitorder="little")
    return torch.from_numpy(bits.astype(bool))


def bool_to_words(
    # [n, n] bool
    mask: torch.Tensor,
    width: int | None = None,
) -> torch.Tensor:
    """One tree's bool mask [n, n] as int64 [n, W]; `width` is W when other trees need more."""
    n = mask.shape[0]
    width = width or -(-mask.shape[1] // WORD_BITS)
    packed = np.zeros((n, width * 8), dtype=np.uint8)
    bits = np.packbits(mask.numpy(), axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    return torch.from_numpy(packed.view(np.int64))


def _words_of(row_counts, length_of) -> torch.Tensor:
    counts = np.atleast_1d(np.asarray(row_counts, dtype=np.int32))
    words = empty_words(counts)
    rows = np.concatenate([np.arange(n) for n in counts]) if len(counts) else np.empty(0, int)
    # [M]: how many leading bits are set
    lengths = length_of(rows, np.repeat(counts, counts)).astype(np.int64)
    # [M, W]: the part of that run which falls into each word
    in_word = np.clip(
        lengths[:, None] - np.arange(words.shape[1]) * WORD_BITS, 0, WORD_BITS
    ).astype(np.uint64)
    full = ~np.uint64(0)
    # A shift by 64 is undefined, so the empty run is set apart.
    shift = np.uint64(WORD_BITS) - np.maximum(in_word, np.uint64(1))
    values = np.where(in_word == 0, np.uint64(0), full >> shift)
    words.copy_(torch.from_numpy(values.view(np.int64)))
    return words
