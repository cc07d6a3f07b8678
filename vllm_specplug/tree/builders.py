# SPDX-License-Identifier: Apache-2.0
"""Builds a tree of at most `budget` nodes from the draft candidates of each depth.

A block drafter gives one distribution per depth, which does not depend on the branch of a node. The
log-probability of a path is then the sum of one candidate per depth. The expected number of
accepted drafts of a tree, under the draft's own distribution, is the sum of exp(score) over its
nodes.

`best_first` maximises that sum exactly. Its nodes have descending scores, so every prefix of its
tree is the best tree of that size, and can be cut to a smaller budget without loss.

`accum_logp`, `entropy` and `hybrid` follow the JetSpec paper: the best frontier node is expanded
into all of its children at once, so low-ranked siblings take budget from deeper nodes. They differ
in their order of frontier nodes. The paper's budget N includes the root: it is `budget` + 1.

Candidate rows are sorted by descending log-probability and repeat no token, as top-k returns them.
A row ends before its first log-probability that is not finite.

Trees of serving size have tens of nodes, where plain Python lists and a heap beat array code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from vllm_specplug.tree.draft_tree import ROOT, DraftTree, as_scores

DEFAULT_HYBRID_LAMBDA = 0.1

# Nodes as parallel lists: token, parent, depth, score.
_Nodes = tuple[list[int], list[int], list[int], list[float]]
# (token rows [D][K], log-probability rows [D][K], budget, hybrid_lambda) -> nodes
_Builder = Callable[[list[list[int]], list[list[float]], int, float], _Nodes]


def build_tree(
    builder: str,
    # [D, K]
    token_ids: npt.NDArray[np.int64],
    # [D, K]
    log_probs: npt.NDArray[np.float32],
    budget: int,
    *,
    tree_width: int,
    tree_depth: int,
    hybrid_lambda: float = DEFAULT_HYBRID_LAMBDA,
) -> DraftTree:
    """Builds one tree.

    Args:
        builder: one of `BUILDERS`.
        token_ids: candidates of each depth, best first.
        log_probs: their log-probabilities under the draft.
        budget: maximum nodes of the tree, excluding the root; 0 gives the empty tree.
        tree_width: maximum children per node; further candidates are ignored.
        tree_depth: maximum depth, limited by D.
        hybrid_lambda: weight of the entropy term of `hybrid`, in nats; other builders ignore it.

    Raises:
        ValueError: if `builder` is unknown.
    """
    build = _BUILDERS.get(builder)
    if build is None:
        raise ValueError(
            f"tree_builder={builder!r} is not known; choose one of {', '.join(BUILDERS)}"
        )
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
    tokens, parents, depths, scores = build(token_rows, logp_rows, budget, hybrid_lambda)
    return DraftTree(
        token_ids=np.array(tokens, dtype=np.int64),
        parent_indices=np.array(parents, dtype=np.int32),
        depths=np.array(depths, dtype=np.int32),
        scores=as_scores(scores),
    )


def _best_first(
    token_rows: list[list[int]], logp_rows: list[list[float]], budget: int, _: float
) -> _Nodes:
    """Returns the `budget` paths with the highest scores, by lazy expansion.

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


def _expand_all_children(
    token_rows: list[list[int]],
    logp_rows: list[list[float]],
    budget: int,
    priority: Callable[[float, int], float],
) -> _Nodes:
    """The paper's expansion: pops the best frontier node, then appends and pushes its children.

    `priority(score, depth)` orders the frontier, highest first; ties keep the order of appending.
    The budget may cut the last expansion. Nodes of the last depth are never expanded.
    """
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    scores: list[float] = []
    num_rows = len(logp_rows)
    # (-priority, node). The node number breaks ties.
    heap = [(0.0, ROOT)]
    count = 0
    while heap and count < budget:
        _neg_priority, parent = heappop(heap)
        depth = depths[parent] if parent != ROOT else 0
        if depth == num_rows:
            continue
        score = scores[parent] if parent != ROOT else 0.0
        child_depth = depth + 1
        for token, logp in zip(token_rows[depth], logp_rows[depth], strict=False):
            if count == budget:
                break
            child_score = score + logp
            tokens.append(token)
            parents.append(parent)
            depths.append(child_depth)
            scores.append(child_score)
            heappush(heap, (-priority(child_score, child_depth), count))
            count += 1
    return tokens, parents, depths, scores


def _accum_logp(
    token_rows: list[list[int]], logp_rows: list[list[float]], budget: int, _: float
) -> _Nodes:
    """The paper's default, which orders the frontier by cumulative log-probability."""
    return _expand_all_children(token_rows, logp_rows, budget, lambda score, depth: score)


def _entropy(
    token_rows: list[list[int]], logp_rows: list[list[float]], budget: int, _: float
) -> _Nodes:
    """Orders the frontier by the entropy at the children's depth."""
    entropies = _child_entropies(logp_rows)
    return _expand_all_children(
        token_rows, logp_rows, budget, lambda score, depth: entropies[depth]
    )


def _hybrid(
    token_rows: list[list[int]], logp_rows: list[list[float]], budget: int, hybrid_lambda: float
) -> _Nodes:
    """Orders the frontier by cumulative log-probability plus `hybrid_lambda` times the entropy."""
    entropies = _child_entropies(logp_rows)
    return _expand_all_children(
        token_rows,
        logp_rows,
        budget,
        lambda score, depth: score + hybrid_lambda * entropies[depth],
    )


def _child_entropies(logp_rows: list[list[float]]) -> list[float]:
    """Returns [D + 1] the draft's entropy in nats at depth d + 1 for nodes of depth d; 0 at D.

    Only the candidates are known, so the rest of the vocabulary counts as one token. This lower
    bound of the entropy is tight if the candidates hold most of the probability.
    """
    entropies = []
    for row in logp_rows:
        probs = [math.exp(logp) for logp in row]
        rest = 1.0 - sum(probs)
        entropy = -sum(p * logp for p, logp in zip(probs, row, strict=True))
        if rest > 0.0:
            entropy -= rest * math.log(rest)
        entropies.append(entropy)
    entropies.append(0.0)
    return entropies


_BUILDERS: dict[str, _Builder] = {
    "best_first": _best_first,
    "accum_logp": _accum_logp,
    "entropy": _entropy,
    "hybrid": _hybrid,
}

BUILDERS: tuple[str, ...] = tuple(_BUILDERS)
