# SPDX-License-Identifier: Apache-2.0
"""What rows of a growing tree attend, and how far an answer follows a tree."""

from __future__ import annotations

import numpy as np

from vllm_specplug.train.level_trees import accepted_nodes, branch_mask
from vllm_specplug.tree import DraftTree


def test_rows_attend_the_context_and_their_own_branch() -> None:
    # root -> a, b; a -> c
    mask = branch_mask([-1, -1, 0], rows=2, context=2)
    assert mask.int().tolist() == [[1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1]]
    assert branch_mask([], rows=1, context=0).tolist() == [[True]]


def test_an_answer_is_followed_as_far_as_the_tree_has_it() -> None:
    tree = DraftTree(
        np.array([5, 6, 7]), np.array([-1, -1, 0]), np.array([1, 1, 2]), np.zeros(3, np.float32)
    )
    assert [accepted_nodes(tree, t) for t in ([5, 7, 9], [5, 6], [6, 7], [7], [])] == [
        2,
        1,
        1,
        0,
        0,
    ]
