# SPDX-License-Identifier: Apache-2.0
"""Masks of the rows of a tree that each row attends, as 64-bit words and as bools.

Letters: R trees, M rows of all trees (roots and nodes), N nodes of one tree, W words per mask row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .extension import has_cpu_extension

WORD_BITS = 64

_Ints = npt.NDArray[Any]


def ancestor_words(parents: Sequence[_Ints]) -> torch.Tensor:
    """Returns the ancestor masks of a batch of trees.

    Args:
        parents: one int32 array [N] per tree, `DraftTree.parent_indices` (-1 is the root); an empty
            array is a tree of only the root.

    Returns:
        int64 [M, W] with M the sum of N + 1: row 0 of a tree is its root, and every row attends
        its ancestors and itself.

    Raises:
        ValueError: if a parent does not precede its child.
    """
    counts = np.fromiter((len(p) + 1 for p in parents), np.int32, len(parents))
    words = empty_words(counts)
    if len(parents):
        _fill_ancestor_words(np.concatenate(parents).astype(np.int32, copy=False), counts, words)
    return words


def _fill_ancestor_words(
    # [sum of N] int32, parents of all trees one after the other
    parents: _Ints,
    # [R] int32, 1 + N of each tree
    row_counts: _Ints,
    # [M, W] int64, zeroed
    words: torch.Tensor,
) -> None:
    if not has_cpu_extension():
        fill_ancestor_words_reference(parents, row_counts, words)
        return
    try:
        torch.ops.specplug.ancestor_words.default(
            torch.from_numpy(parents), torch.from_numpy(row_counts), words
        )
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def fill_ancestor_words_reference(
    # [sum of N] int32
    parents: _Ints,
    # [R] int32
    row_counts: _Ints,
    # [M, W] int64, zeroed
    words: torch.Tensor,
) -> None:
    """`ancestor_words` in NumPy."""
    rows = words.numpy().view(np.uint64)
    start = done = 0
    for tree, count in enumerate(row_counts.tolist()):
        rows[start, 0] = 1
        for j in range(1, count):
            up = int(parents[done]) + 1  # row of the parent
            done += 1
            if not 0 <= up < j:
                raise ValueError(
                    f"node {j - 1} of tree {tree} has parent {up - 1}; a parent precedes its "
                    "child and -1 is the root"
                )
            rows[start + j] = rows[start + up]
            rows[start + j, j // 64] |= np.uint64(1) << np.uint64(j % 64)
        start += count


def causal_words(row_counts: int | Sequence[int]) -> torch.Tensor:
    """Returns masks of chains, int64 [M, W]: row i attends rows 0..i. One count, or one per
    tree."""
    return _words_of(row_counts, lambda i, n: i + 1)


def full_words(row_counts: int | Sequence[int]) -> torch.Tensor:
    """Returns masks of bidirectional blocks, int64 [M, W]: a row attends all rows of its tree."""
    return _words_of(row_counts, lambda i, n: np.full_like(i, n))


def own_words(row_counts: int | Sequence[int]) -> torch.Tensor:
    """Returns masks int64 [M, W] with which a row attends itself and no other row of its tree."""
    return causal_words(row_counts) ^ _words_of(row_counts, lambda i, n: i)


def empty_words(row_counts: _Ints) -> torch.Tensor:
    """Returns zeroed masks int64 [M, W] for trees of the given row counts."""
    widest = int(row_counts.max()) if len(row_counts) else 1
    return torch.zeros(int(row_counts.sum()), -(-widest // WORD_BITS), dtype=torch.int64)


def words_to_bool(
    # [M, W] int64
    words: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    """Returns the first `columns` bits of every row as bool [M, columns]."""
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=columns, bitorder="little")
    return torch.from_numpy(bits.astype(bool))


def ancestor_mask(
    # [n] int32, row of each row's parent, -1 for none
    parent_rows: torch.Tensor,
) -> torch.Tensor:
    """Returns a mask bool [n, n]: row i is row j or descends from it."""
    n = parent_rows.numel()
    mask = torch.eye(n, dtype=torch.bool)
    for i, parent in enumerate(parent_rows.tolist()):
        if 0 <= parent < i:
            mask[i] |= mask[parent]
    return mask.to(parent_rows.device)


def _words_of(
    row_counts: int | Sequence[int], length_of: Callable[[_Ints, _Ints], _Ints]
) -> torch.Tensor:
    counts = np.atleast_1d(np.asarray(row_counts, dtype=np.int32))
    words = empty_words(counts)
    rows = np.concatenate([np.arange(n) for n in counts]) if len(counts) else np.empty(0, int)
    # [M]: number of leading bits to set
    lengths = length_of(rows, np.repeat(counts, counts)).astype(np.int64)
    # [M, W]: number of these bits in each word
    in_word = np.clip(
        lengths[:, None] - np.arange(words.shape[1]) * WORD_BITS, 0, WORD_BITS
    ).astype(np.uint64)
    full = ~np.uint64(0)
    # A shift by 64 is undefined, so words without bits are a special case.
    shift = np.uint64(WORD_BITS) - np.maximum(in_word, np.uint64(1))
    values = np.where(in_word == 0, np.uint64(0), full >> shift)
    words.copy_(torch.from_numpy(values.view(np.int64)))
    return words
