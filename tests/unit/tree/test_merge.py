# SPDX-License-Identifier: Apache-2.0
"""Merged trees share prefixes, keep the best nodes, and stay trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.candidates import paths_of, trees
from vllm_specplug.tree import DraftTree, merge_trees

DROPS = (0.0, 0.25, 0.5, 2.0, 1e-40, 1e37)


@given(st.lists(trees(10, 5, DROPS), min_size=1, max_size=4), st.integers(0, 20))
def test_the_union_keeps_its_best_nodes(given: list[DraftTree], budget: int) -> None:
    merged = merge_trees(given, budget)
    merged.validate()
    union: dict[tuple[int, ...], float] = {}
    for tree in given:
        for path, score in paths_of(tree).items():
            union[path] = max(union.get(path, -np.inf), score)
    assert merged.num_nodes == min(budget, len(union))
    kept = paths_of(merged)
    assert all(union[path] == score for path, score in kept.items())
    dropped = [score for path, score in union.items() if path not in kept]
    if kept and dropped:
        assert min(kept.values()) >= max(dropped)


def test_one_small_tree_is_returned_as_it_is() -> None:
    tree = DraftTree.chain([1, 2, 3])
    assert merge_trees([tree], 3) is tree
    assert merge_trees([tree], 2).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("parents", "scores"),
    [
        ([1, -1], [-1.0, -0.5]),  # a child before its parent
        ([-1, -2], [-1.0, -1.0]),
        ([-1, 0], [-1.0, -0.5]),  # a child that would stay when its parent goes
        ([-1, 0], [-1.0, np.nan]),
    ],
)
def test_what_is_no_tree_stays_none(parents: list[int], scores: list[float]) -> None:
    broken = DraftTree(
        np.array([3, 4]), np.array(parents, np.int32), np.array([1, 2], np.int32),
        np.array(scores, np.float32),
    )  # fmt: skip
    for budget in (1, 9):
        for pair in ([broken, DraftTree.chain([5])], [DraftTree.chain([5]), broken]):
            assert merge_trees(pair, budget).fault(9)
