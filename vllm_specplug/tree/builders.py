# SPDX-License-Identifier: Apache-2.0
"""Builds a tree of at most `budget` nodes from the draft candidates of each depth.

A block drafter gives one distribution per depth, which does not depend on the branch of a node. The
log-probability of a path is then the sum of one candidate per depth. The expected number of
accepted drafts of a tree, under the draft's own distribution, is the sum of exp(score) over its
nodes. Best-first expansion maximises that sum exactly. Nodes have descending scores, so every
prefix of a tree is the best tree of that size, and can be cut to a smaller budget without loss.

Candidate rows are sorted by descending log-probability and repeat no token, as top-k returns them.
A row ends before its first log-probability that is not finite.

Trees of serving size have tens of nodes, where plain Python lists and a heap beat array code.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from vllm_specplug.tree.draft_tree import ROOT, DraftTree, as_scores


def build_tree(
    # [D, K] candidates of each depth, best first
    token_ids: npt.NDArray[np.int64],
    # [D, K] their log-probabilities under the draft
    log_probs: npt.NDArray[np.float32],
    budget: int,
    *,
    tree_width: int,
    tree_depth: int,
) -> DraftTree:
    """Returns the tree of the `budget` paths with the highest scores.

    Args:
        budget: maximum nodes of the tree, excluding the root; 0 gives the empty tree.
        tree_width: maximum children per node; further candidates are ignored.
        tree_depth: maximum depth, limited by D.
    """
    assert token_ids.ndim == 2, token_ids.shape
    assert token_ids.shape == log_probs.shape, (token_ids.shape, log_probs.shape)
    assert tree_width >= 1, tree_width
    if budget <= 0 or tree_depth <= 0:
        return DraftTree.empty()
    rows = log_probs[:tree_depth, :tree_width]
    # Rounding can make log-probabilities positive. A child must not score more than its parent.
    logp_rows = np.minimum(rows, 0.0).tolist()
    if not np.isfinite(rows).all():
        finite = np.logical_and.accumulate(np.isfinite(rows), axis=1).sum(axis=1)
        logp_rows = [row[:end] for row, end in zip(logp_rows, finite.tolist(), strict=True)]
    token_rows = token_ids[:tree_depth, :tree_width].tolist()
    tokens, parents, depths, scores = _best_first(token_rows, logp_rows, budget)
    return DraftTree(
        token_ids=np.array(tokens, dtype=np.int64),
        parent_indices=np.array(parents, dtype=np.int32),
        depths=np.array(depths, dtype=np.int32),
        scores=as_scores(scores),
    )


def _best_first(
    # [D][K]
    token_rows: list[list[int]],
    logp_rows: list[list[float]],
    budget: int,
) -> tuple[list[int], list[int], list[int], list[float]]:
    """Returns token, parent, depth and score of each node, by lazy expansion.

    The heap holds candidates, not nodes. A popped candidate becomes a node; only then do its next
    sibling and its first child become candidates. Neither scores more than it does, so candidates
    are popped by descending score, and the heap never holds more than budget + 1.
    """
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    scores: list[float] = []
    if not logp_rows or not logp_rows[0]:
        return tokens, parents, depths, scores
    num_rows = len(logp_rows)
    first = logp_rows[0]
    # (-score, order of entry, parent, depth - 1, rank, parent's score). The order breaks ties.
    heap = [(-first[0], 0, ROOT, 0, 0, 0.0)]
    entered = 1
    node = 0
    while heap:
        neg_score, _order, parent, row, rank, parent_score = heappop(heap)
        tokens.append(token_rows[row][rank])
        parents.append(parent)
        depths.append(row + 1)
        scores.append(-neg_score)
        if node + 1 == budget:
            break
        logps = logp_rows[row]
        rank += 1
        if rank < len(logps):
            score = parent_score + logps[rank]
            heappush(heap, (-score, entered, parent, row, rank, parent_score))
            entered += 1
        row += 1
        if row < num_rows and logp_rows[row]:
            score = -neg_score + logp_rows[row][0]
            heappush(heap, (-score, entered, node, row, 0, -neg_score))
            entered += 1
        node += 1
    return tokens, parents, depths, scores
