# SPDX-License-Identifier: Apache-2.0
"""Trees of a fixed shape."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.static_tree import build_static


def _candidates(depths: int = 4, width: int = 4):
    ids = np.arange(depths * width).reshape(depths, width)
    logps = np.log(np.linspace(0.4, 0.1, width, dtype=np.float32))
    return ids, np.tile(logps, (depths, 1))


def test_the_published_tree_has_40_nodes_and_27_leaves() -> None:
    ids, logps = _candidates()
    tree = build_static(ids, logps, [1, 3, 3, 3])
    assert tree.num_nodes == 40
    assert np.bincount(tree.depths).tolist() == [0, 1, 3, 9, 27]
    assert len(set(range(40)) - set(tree.parent_indices.tolist())) == 27
    assert (tree.parent_indices < np.arange(40)).all()
    for node in range(40):
        path = tree.path_to(node)
        assert tree.scores[node] == pytest.approx(
            sum(logps[d, list(ids[d]).index(tree.token_ids[n])] for d, n in enumerate(path)),
            rel=1e-5,
        )
        assert all(tree.parent_indices[b] == a for a, b in pairwise(path))


def test_missing_candidates_narrow_the_tree() -> None:
    ids, logps = _candidates(depths=2, width=2)
    assert build_static(ids, logps, [3, 3, 3]).num_nodes == 2 + 4
    logps[0, 1] = -np.inf
    assert build_static(ids, logps, [3, 3, 3]).num_nodes == 1 + 2
    assert build_static(ids[:0], logps[:0], [1, 3]).num_nodes == DraftTree.empty().num_nodes
