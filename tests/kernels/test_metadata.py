# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.tree_problem import path_of, random_parents
from vllm_specplug.kernels import (
    TreeAttnMetadata,
    ancestor_words,
    block_metadata,
    causal_words,
    full_words,
    tree_metadata,
)
from vllm_specplug.kernels.masks import (
    ancestor_mask,
    fill_ancestor_words_reference,
    words_to_bool,
)


def bits_of(words: torch.Tensor, columns: int) -> list[list[int]]:
    """Set columns of every row, by Python integers."""
    rows = []
    for row in words.tolist():
        number = sum((w % 2**64) << (64 * i) for i, w in enumerate(row))
        assert number >> columns == 0, "a bit past the last column"
        rows.append([j for j in range(columns) if number >> j & 1])
    return rows


@given(st.lists(st.integers(0, 140), min_size=1, max_size=4), st.integers(0, 99))
def test_ancestor_words_are_root_to_node_paths(node_counts, seed):
    rng = np.random.default_rng(seed)
    parents = [random_parents(n, rng) for n in node_counts]
    words = ancestor_words(parents)
    assert words.shape == (sum(node_counts) + len(parents), (max(node_counts) + 64) // 64)
    start = 0
    for tree in parents:
        rows = len(tree) + 1
        assert bits_of(words[start : start + rows], rows) == [
            path_of(tree, row) for row in range(rows)
        ]
        parent_rows = torch.from_numpy(np.concatenate([[-1], tree + 1]))
        attended = words_to_bool(words[start : start + rows], rows)
        assert torch.equal(attended, ancestor_mask(parent_rows))
        start += rows
    filled = torch.zeros_like(words)
    counts = np.array([n + 1 for n in node_counts], dtype=np.int32)
    fill_ancestor_words_reference(np.concatenate(parents), counts, filled)
    assert torch.equal(words, filled)


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2], [-1, 0, 7]])
def test_a_parent_after_its_child_is_refused(parents):
    with pytest.raises(ValueError, match="a parent precedes its child"):
        ancestor_words([np.array(parents, dtype=np.int32)])


@pytest.mark.parametrize("counts", [1, 63, 64, 65, 128, 129, [1, 2, 64], [65, 3]])
def test_causal_and_full_words(counts):
    sizes = counts if isinstance(counts, list) else [counts]
    causal, full = causal_words(counts), full_words(counts)
    start = 0
    for n in sizes:
        assert bits_of(causal[start : start + n], n) == [list(range(i + 1)) for i in range(n)]
        assert bits_of(full[start : start + n], n) == [list(range(n))] * n
        start += n
    assert causal.shape == full.shape == (start, -(-max(sizes) // 64))


def test_metadata_of_trees_and_blocks():
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    parents = [np.array([-1, 0], dtype=np.int32), np.empty(0, dtype=np.int32)]
    meta = tree_metadata([2, 0], [5, 9], [31, 7], parents, table)
    assert meta.plan.tolist() == [[2, 0], [5, 9], [3, 1], [31, 7], [0, 3]]
    assert (meta.num_trees, meta.num_rows) == (2, 4)
    assert (meta.max_rows, meta.max_context) == (3, 31)
    block = block_metadata([1, 0], [40, 2], 8, True, table)
    assert block.plan.tolist() == [[1, 0], [0, 8], [8, 8], [40, 2], [0, 8]]
    assert torch.equal(block.mask_words, causal_words([8, 8]))
    assert torch.equal(block_metadata([1], [4], 3, False, table).mask_words, full_words(3))


def test_metadata_without_trees_or_without_a_mask():
    table = torch.zeros(2, 1, dtype=torch.int64)
    words = ancestor_words([])
    assert words.shape == (0, 1)
    meta = TreeAttnMetadata.build([], [], [], [], words, table)
    assert (meta.num_trees, meta.num_rows, meta.max_rows, meta.max_context) == (0, 0, 0, 0)
    assert meta.block_table.dtype == torch.int32
    with pytest.raises(AssertionError, match="no mask"):
        TreeAttnMetadata(meta.plan, meta.block_table, 0, 0)
