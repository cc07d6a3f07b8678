# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.candidates import cases, paths_of
from vllm_specplug.tree import ROOT, DraftTree

COLUMNS = ["token_ids", "parent_indices", "depths", "scores"]


def make_tree(token_ids, parent_indices, depths, scores=(0.0, 0.0)) -> DraftTree:
    types = (np.int64, np.int32, np.int32, np.float32)
    columns = zip((token_ids, parent_indices, depths, scores), types, strict=True)
    return DraftTree(*(np.array(column, kind) for column, kind in columns))


@given(cases(), st.integers(0, 45))
def test_every_prefix_is_a_tree(case, num_nodes):
    tree = case.build()
    shorter = tree.prefix(num_nodes)
    shorter.validate()
    assert shorter.num_nodes == min(num_nodes, tree.num_nodes)
    assert (shorter is tree) == (num_nodes >= tree.num_nodes)
    assert shorter.token_ids.tolist() == tree.token_ids[:num_nodes].tolist()
    for node in range(tree.num_nodes):
        parent, token = int(tree.parent_indices[node]), int(tree.token_ids[node])
        assert shorter.child_of(parent, token) == (node if node < num_nodes else None)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, 2], [1, ROOT], [2, 1]), "a parent must precede its child, but node 0 has 1"),
        (([1, 2], [ROOT, 1], [1, 2]), "a parent must precede its child, but node 1 has 1"),
        (([1, 2], [ROOT, -2], [1, 1]), "a parent must precede its child, but node 1 has -2"),
        (([1, 2], [ROOT, 0], [1, 1]), "one deeper than its parent, but node 1 has 1"),
        (([1, 2], [ROOT, ROOT], [1, 2]), "one deeper than its parent, but node 1 has 2"),
        (([1, -1], [ROOT, 0], [1, 2]), "tokens are not negative and below .*, but node 1 has -1"),
        (([1, 7], [ROOT, 0], [1, 2]), "tokens are not negative and below 7, but node 1 has 7"),
        (([4, 4], [ROOT, ROOT], [1, 1]), "node 1 is a second child of node -1 with token 4"),
        (([1, 2], [ROOT, 0], [1, 2], [-0.5, -0.25]), "scores more than its parent, but node 1"),
        (([1], [ROOT], [1], [0.5]), "scores more than its parent, but node 0"),
        (([1], [ROOT], [1], [np.nan]), "scores more than its parent, but node 0 has nan"),
    ],
)
def test_validate_names_the_broken_invariant(columns, message):
    tree = make_tree(*columns)
    assert tree.fault(7)
    with pytest.raises(ValueError, match=message):
        tree.validate(7)


def test_validate_names_shape_and_dtype():
    tree = DraftTree.chain([1, 2])
    wrong = DraftTree(tree.token_ids, tree.parent_indices[:1], tree.depths, tree.scores)
    with pytest.raises(ValueError, match=r"parent_indices has shape \(1,\)"):
        wrong.validate()
    assert wrong.fault(9)
    wrong = DraftTree(tree.token_ids, tree.parent_indices, tree.depths.astype(float), tree.scores)
    with pytest.raises(ValueError, match=r"depths .* float64; expected \(2,\) and int32"):
        wrong.validate()
    assert wrong.fault(9)


@given(
    cases(),
    st.sampled_from(COLUMNS),
    st.integers(0, 40),
    st.sampled_from([-2, -1, 0, 1, 2, 6, 7, 8, 99, -0.5, 0.25, float("nan"), float("-inf")]),
)
def test_no_other_columns_than_those_of_a_tree_are_valid(case, name, place, value):
    tree = case.build()
    assert tree.fault(7) is None
    columns = {column: getattr(tree, column).copy() for column in COLUMNS}
    if tree.num_nodes and (name == "scores" or value in range(-2, 100)):
        columns[name][place % tree.num_nodes] = value
    changed = DraftTree(**columns)
    try:
        paths_of(changed)
        is_valid = all(0 <= token < 7 for token in changed.token_ids)
    except AssertionError:
        is_valid = False
    assert (changed.fault(7) is None) == is_valid
