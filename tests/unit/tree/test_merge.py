# SPDX-License-Identifier: Apache-2.0
"""Merged trees share prefixes, keep the best nodes, and stay trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.tree import DraftTree, merge_trees


@st.composite
def scored_trees(draw: st.DrawFn) -> DraftTree:
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    scores: list[float] = []
    for _ in range(draw(st.integers(0, 10))):
        parent = draw(st.integers(-1, len(tokens) - 1))
        token = draw(st.integers(0, 4))
        if (parent, token) in set(zip(parents, tokens, strict=True)):
            continue
        tokens.append(token)
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
        drop = draw(st.sampled_from([0.0, 0.25, 0.5, 2.0]))
        scores.append((0.0 if parent < 0 else scores[parent]) - drop)
    return DraftTree(
        np.array(tokens, dtype=np.int64),
        np.array(parents, dtype=np.int32),
        np.array(depths, dtype=np.int32),
        np.array(scores, dtype=np.float32),
    )


def _paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {
        tuple(int(tree.token_ids[n]) for n in tree.path_to(node)): float(tree.scores[node])
        for node in range(tree.num_nodes)
    }


@given(st.lists(scored_trees(), min_size=1, max_size=4), st.integers(0, 20))
def test_the_union_keeps_its_best_nodes(trees: list[DraftTree], budget: int) -> None:
    merged = merge_trees(trees, budget)
    merged.validate()
    union: dict[tuple[int, ...], float] = {}
    for tree in trees:
        for path, score in _paths(tree).items():
            union[path] = max(union.get(path, -np.inf), score)
    assert merged.num_nodes == min(budget, len(union))
    kept = _paths(merged)
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
        np.array([3, 4]),
        np.array(parents, np.int32),
        np.array([1, 2], np.int32),
        np.array(scores, np.float32),
    )
    for budget in (1, 9):
        for trees in ([broken, DraftTree.chain([5])], [DraftTree.chain([5]), broken]):
            assert not merge_trees(trees, budget).is_valid(9)
