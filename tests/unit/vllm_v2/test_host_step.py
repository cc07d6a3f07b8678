# SPDX-License-Identifier: Apache-2.0
"""Trees of the device on their way to the host."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from tests.unit.tree.candidates import columns_of, tree_of
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.metrics import TREE_NODES_ATTRIBUTE
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_v2.host_step import TreesCopy
from vllm_specplug.vllm_v2.runner import TreeOutput

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


def test_some_requests_are_drafted_for_and_their_trees_spread() -> None:
    ints = torch.arange(4, dtype=torch.int32)
    requests = DeviceRequests(
        ints.long() + 10, ints + 20, ints + 1, ints + 5, 4, N, 30, max_depth=3
    )
    rows = torch.tensor([1, 3])
    some = requests.select(rows)
    assert (some.anchors.tolist(), some.context_lens.tolist()) == ([11, 13], [21, 23])
    assert some.budgets.tolist() == [2, 4] and some.depths.tolist() == [6, 8]
    assert some.rows is not None and some.rows.tolist() == [1, 3] and some.max_depth == 3
    whole = TreesCopy(on_device([TREES[0], TREES[2]]).scatter(rows, 4), ints + 9)
    wanted = [DraftTree.empty(), TREES[0], DraftTree.empty(), TREES[2]]
    assert all(same(whole.merged[row], tree) for row, tree in enumerate(wanted))


def test_an_output_carries_the_sizes_of_its_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays one of vLLM's outputs, whatever a release adds to those."""
    monkeypatch.setattr(AsyncOutput, "get_output", lambda self: self.model_runner_output)
    output = object.__new__(AsyncOutput)
    output.model_runner_output = SimpleNamespace()
    output.__class__, output.tree_nodes = TreeOutput, lambda: {"a": 3}
    assert getattr(output.get_output(), TREE_NODES_ATTRIBUTE) == {"a": 3}
