# SPDX-License-Identifier: Apache-2.0
"""Trees of the device on their way to the host."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.tree.candidates import columns_of, tree_of
from vllm_specplug.drafting.device_requests import DeviceTrees
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_v2.host_step import TreesCopy

N = 5
TREES = [
    tree_of([7, 8, 9], [-1, -1, 0], [-0.1, -0.5, -0.75]),
    DraftTree.empty(),
    DraftTree.chain([4, 5, 6, 7, 1 << 20], -0.3 * np.arange(1, 6)),
]


def on_device(trees: list[DraftTree]) -> DeviceTrees:
    # Anything may lie behind a tree's nodes.
    tokens, parents, depths = (torch.full((len(trees), N), 77) for _ in range(3))
    scores = torch.full((len(trees), N), 7.0)
    for r, tree in enumerate(trees):
        n = tree.num_nodes
        tokens[r, :n] = torch.from_numpy(tree.token_ids)
        parents[r, :n] = torch.from_numpy(tree.parent_indices)
        depths[r, :n] = torch.from_numpy(tree.depths)
        scores[r, :n] = torch.from_numpy(tree.scores)
    counts = torch.tensor([tree.num_nodes for tree in trees], dtype=torch.int32)
    return DeviceTrees(tokens, parents.int(), depths.int(), scores, counts)


def same(a: DraftTree, b: DraftTree) -> bool:
    return columns_of(a) == columns_of(b)


def test_trees_arrive_whole_and_cut_to_their_rows() -> None:
    copy = TreesCopy(on_device(TREES), torch.tensor([2, 3, 9], dtype=torch.int32))
    for row, tree in enumerate(TREES):
        assert same(copy.merged[row], tree)
        assert same(copy.read(row), tree.prefix((2, 3, 9)[row]))
        assert copy.num_nodes(row) == copy.read(row).num_nodes
        assert copy.lookup_only[row].num_nodes == 0 and copy.branches(row) == []


def test_branches_arrive_beside_the_trees_they_make() -> None:
    alone = [TREES[2], TREES[0], TREES[1]]
    sizes = torch.tensor([[4, 1], [0, 0], [2, 0]], dtype=torch.int32)
    tokens = torch.arange(18, dtype=torch.int32).view(3, 2, 3)
    tokens[2, 0, 2] = -1
    room = torch.zeros(3, dtype=torch.int32)
    copy = TreesCopy(on_device(TREES), room, on_device(alone), (sizes, tokens))
    for row in range(3):
        assert same(copy.merged[row], TREES[row]) and same(copy.lookup_only[row], alone[row])
    assert copy.branches(0) == [(4, [0, 1, 2]), (1, [3, 4, 5])]
    assert copy.branches(1) == []
    assert copy.branches(2) == [(2, [12, 13])]
