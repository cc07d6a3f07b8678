# SPDX-License-Identifier: Apache-2.0
"""Builds trees level by level, for drafters that condition each node on its branch.

Letters: R requests, F frontier nodes of all requests, K candidates per node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.tree.draft_tree import ROOT, DraftTree, as_scores


@dataclass(frozen=True)
class Frontier:
    """Nodes whose children are drafted next, ordered by request, best first within each.

    Nodes are numbered within their request, in the order in which they were drafted.
    """

    # [F] index into the requests
    requests: np.ndarray
    # [F] node number, ROOT (-1) for the anchor
    nodes: np.ndarray
    # [F] number of the parent; ROOT for anchors and for children of the root
    parents: np.ndarray
    # [F] row of the parent in the previous frontier; ROOT for anchors
    parent_rows: np.ndarray
    # [F]
    token_ids: np.ndarray
    # levels drafted so far: 0 when the frontier holds the anchors
    depth: int

    def __len__(self) -> int:
        return len(self.nodes)


# frontier -> candidate token ids int64 [F, K], best first, and their log-probabilities given the
# branch, float32 [F, K], at most 0. A row ends before its first value that is not finite.
Expand = Callable[[Frontier], tuple[np.ndarray, np.ndarray]]

FRONTIER_WIDTH = 16
"""Default of the maximum number of nodes per request that a level expands. Trees of up to as many
nodes are best-first, larger ones are close to it."""

# `row` is the parent's row in the frontier that the node was drafted from.
_NODE = np.dtype(
    [
        ("number", np.int64),
        ("parent", np.int64),
        ("row", np.int64),
        ("token", np.int64),
        ("depth", np.int32),
        ("score", np.float64),
    ]
)


class _GrowingTree:
    """The best nodes of one request so far, best first; ties keep the order of drafting."""

    def __init__(self, anchor: int) -> None:
        self.nodes = np.empty(0, _NODE)
        self.frontier = np.array([(ROOT, ROOT, ROOT, anchor, 0, 0.0)], _NODE)
        self.num_drafted = 0

    def grow(
        self,
        # [f, K] of `frontier`, which begins at row `start` of the frontier of all requests
        ids: np.ndarray,
        log_probs: np.ndarray,
        start: int,
        *,
        budget: int,
        frontier_width: int | None,
        min_score: float,
    ) -> None:
        """Drafts a level of at most `budget` nodes and keeps the best `budget` nodes of all levels.

        `frontier` becomes the kept nodes of the new level with at least `min_score`.
        """
        depth = int(self.frontier["depth"][0]) + 1
        usable = np.logical_and.accumulate(np.isfinite(log_probs), axis=1)
        rows = np.nonzero(usable)[0]
        # Rounding can make the log-probability of a certain token positive. Without the limit it
        # would outscore its parent.
        scores = self.frontier["score"][rows] + np.minimum(log_probs[usable], 0.0)
        # Stable sorts, so that among equal scores an ancestor stays before its descendants.
        order = np.argsort(-scores, kind="stable")[:budget]
        level = np.empty(len(order), _NODE)
        level["number"] = np.arange(self.num_drafted, self.num_drafted + len(order))
        level["parent"] = self.frontier["number"][rows[order]]
        level["row"] = start + rows[order]
        level["token"] = ids[usable][order]
        level["depth"] = depth
        level["score"] = scores[order]
        self.num_drafted += len(order)
        nodes = np.concatenate((self.nodes, level))
        self.nodes = nodes[np.argsort(-nodes["score"], kind="stable")[:budget]]
        is_next = (self.nodes["depth"] == depth) & (self.nodes["score"] >= min_score)
        self.frontier = self.nodes[is_next][:frontier_width]

    def tree(self) -> DraftTree:
        """Returns the tree of all kept nodes."""
        # Index -1, the parent of the root's children, is the last entry.
        index_of = np.full(self.num_drafted + 1, ROOT, np.int32)
        index_of[self.nodes["number"]] = np.arange(len(self.nodes), dtype=np.int32)
        return DraftTree(
            token_ids=self.nodes["token"].copy(),
            parent_indices=index_of[self.nodes["parent"]],
            depths=self.nodes["depth"].copy(),
            scores=as_scores(self.nodes["score"]),
        )


def draft_level_by_level(
    anchors: Sequence[int],
    budgets: Sequence[int],
    depths: Sequence[int],
    tree_width: int,
    expand: Expand,
    *,
    frontier_width: int | None = FRONTIER_WIDTH,
    min_node_prob: float = 0.0,
    min_level_prob: float = 0.0,
) -> list[DraftTree]:
    """Returns the trees of R requests, with one call of `expand` per level.

    Each tree keeps the best `budget` nodes of all levels so far. A child never scores more than its
    parent, so a dropped node and its descendants can never return; the kept nodes of the newest
    level are expanded. Nodes are sorted best first, parents before children, so every prefix of a
    tree is the best tree of its size.

    The result is the exact best-first tree, unless a level had more than `frontier_width` nodes to
    expand.

    Args:
        anchors: [R] tokens at the roots.
        budgets: [R] maximum nodes per tree.
        depths: [R] maximum depth per tree.
        tree_width: maximum children per node; 1 drafts chains.
        expand: drafts the children of a frontier; the first call gets the anchors.
        frontier_width: maximum nodes per request that a level expands; None for no limit.
        min_node_prob: minimum probability of a node for its children to be drafted. Children of
            anchors are always drafted.
        min_level_prob: minimum sum of the probabilities of all nodes that a level would expand, for
            it to be expanded.
    """
    min_score = math.log(min_node_prob) if min_node_prob > 0 else -math.inf
    growing = [_GrowingTree(anchor) for anchor in anchors]
    for level in range(max(depths, default=0)):
        expanded = [
            r
            for r, tree in enumerate(growing)
            if budgets[r] > 0 and level < depths[r] and len(tree.frontier)
        ]
        if not expanded:
            break
        counts = [len(growing[r].frontier) for r in expanded]
        nodes = np.concatenate([growing[r].frontier for r in expanded])
        if level and float(np.exp(nodes["score"]).sum()) < min_level_prob:
            break
        frontier = Frontier(
            requests=np.repeat(np.array(expanded, np.int64), counts),
            nodes=nodes["number"].copy(),
            parents=nodes["parent"].copy(),
            parent_rows=nodes["row"].copy(),
            token_ids=nodes["token"].copy(),
            depth=level,
        )
        ids, log_probs = expand(frontier)
        assert ids.shape == log_probs.shape and len(ids) == len(frontier), (ids.shape,)
        start = 0
        for r, count in zip(expanded, counts, strict=True):
            rows, ranks = slice(start, start + count), slice(0, tree_width)
            growing[r].grow(
                ids[rows, ranks],
                log_probs[rows, ranks],
                start,
                budget=budgets[r],
                frontier_width=frontier_width,
                min_score=min_score,
            )
            start += count
    return [tree.tree() for tree in growing]


class BranchRows:
    """The expanded nodes of R requests as rows of trees, with the anchor in row 0.

    Deeper levels attend these rows, because a node has keys once it is expanded. All ancestors of a
    node are expanded before it.
    """

    def __init__(self, num_requests: int) -> None:
        # Parent row minus one of each row except the first, as in `DraftTree.parent_indices`
        self.parents: list[list[int]] = [[] for _ in range(num_requests)]
        self._row_of: list[dict[int, int]] = [{} for _ in range(num_requests)]

    def add(self, frontier: Frontier) -> None:
        """Appends a frontier's nodes to the rows of their requests."""
        for r, node, parent in zip(
            frontier.requests.tolist(), frontier.nodes.tolist(), frontier.parents.tolist(),
            strict=True,
        ):  # fmt: skip
            rows, parents = self._row_of[r], self.parents[r]
            if node == ROOT:
                rows[ROOT] = ROOT
            else:
                rows[node] = len(parents)
                parents.append(rows[parent])

    def parent_arrays(self) -> list[np.ndarray]:
        """Returns [R] the parents of the rows below each anchor, int32."""
        return [np.array(parents, dtype=np.int32) for parents in self.parents]
