# SPDX-License-Identifier: Apache-2.0
"""Best-first trees where what follows a node depends on its whole branch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vllm_specplug.tree.draft_tree import ROOT, DraftTree

Expand = Callable[
    [int, npt.NDArray[np.int64], npt.NDArray[np.int64]],
    tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]],
]
"""expand(depth, parents, tokens) -> children of a frontier, one depth at a time.

`depth` [1..D] is the children's. The frontier holds F nodes of depth - 1: `tokens` [F] are theirs
and `parents` [F] say which node of the frontier before each one extends; for depth 1 the frontier
is the root, with one parent -1 and token -1. Returns token ids and log-probabilities given the
branch, each [F, K], best first; a row ends at its first log-probability that is not finite.
"""


def grow_tree(expand: Expand, budget: int, *, tree_width: int, tree_depth: int) -> DraftTree:
    """The `budget` paths of highest cumulative log-probability, exactly.

    Grown depth by depth: one call of `expand` serves a whole frontier. Of all nodes seen so far
    only the best `budget` are kept. A child never scores more than its parent, so what falls out
    could not come back with its children, and the next frontier is what is left of the newest
    depth: at most `budget` nodes, in practice a few. Nodes come out best first, so every prefix is
    the best tree of its size. Ties go to the node seen first, which puts parents before children.
    """
    assert tree_width >= 1, tree_width
    if budget <= 0 or tree_depth <= 0:
        return DraftTree.empty()
    tokens = np.empty(0, np.int64)
    parents = np.empty(0, np.int64)  # numbers of the order nodes were seen in
    depths = np.empty(0, np.int32)
    scores = np.empty(0, np.float64)
    numbers = np.empty(0, np.int64)
    frontier = np.array([ROOT], np.int64)
    frontier_scores = np.zeros(1, np.float64)
    links, seen = np.array([ROOT], np.int64), 0
    frontier_tokens = np.array([ROOT], np.int64)
    for depth in range(1, tree_depth + 1):
        ids, log_probs = expand(depth, links, frontier_tokens)
        ids, log_probs = ids[:, :tree_width], log_probs[:, :tree_width]
        usable = np.logical_and.accumulate(np.isfinite(log_probs), axis=1)
        row, _rank = np.nonzero(usable)
        tokens = np.append(tokens, ids[usable])
        parents = np.append(parents, frontier[row])
        depths = np.append(depths, np.full(len(row), depth, np.int32))
        scores = np.append(scores, frontier_scores[row] + log_probs[usable].astype(np.float64))
        rows = np.append(np.full(len(numbers), -1), row)
        numbers = np.append(numbers, np.arange(seen, seen + len(row)))
        seen += len(row)
        kept = np.lexsort((numbers, -scores))[:budget]
        tokens, parents, depths = tokens[kept], parents[kept], depths[kept]
        scores, numbers, rows = scores[kept], numbers[kept], rows[kept]
        newest = depths == depth
        if not newest.any():
            break
        frontier, frontier_scores = numbers[newest], scores[newest]
        links, frontier_tokens = rows[newest], tokens[newest]
    places = np.full(seen + 1, ROOT, np.int32)
    places[numbers] = np.arange(len(numbers), dtype=np.int32)
    return DraftTree(
        token_ids=tokens,
        parent_indices=places[parents],
        depths=depths,
        scores=scores.astype(np.float32),
    )
