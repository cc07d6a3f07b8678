# SPDX-License-Identifier: Apache-2.0
"""Trees of drafters that draft level by level, each node conditioned on its whole branch.

Letters: R requests, F frontier nodes of all requests, K candidates of one node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.tree.draft_tree import ROOT, DraftTree, as_scores


@dataclass(frozen=True)
class Frontier:
    """Nodes whose children are drafted next: request by request, best first within each.

    Nodes go by number, in the order in which those of their request were drafted.
    """

    # [F] index into the requests
    requests: np.ndarray
    # [F] node, ROOT (-1) for the anchor
    nodes: np.ndarray
    # [F] its parent; ROOT for anchors and for children of the root
    parents: np.ndarray
    # [F] row of its parent in the frontier before this one; ROOT for anchors
    parent_rows: np.ndarray
    # [F]
    token_ids: np.ndarray
    # levels drafted so far: 0 when the frontier holds the anchors
    depth: int

    def __len__(self) -> int:
        return len(self.nodes)


# frontier -> candidate token ids int64 [F, K], best first, and their log-probabilities given the
# branch float32 [F, K], none of them positive. A row ends at its first that is not finite.
Expand = Callable[[Frontier], tuple[np.ndarray, np.ndarray]]

FRONTIER_WIDTH = 16
"""Most nodes of one request that a level expands, where a method does not say otherwise."""

# `row`: the parent's row in the frontier that the node was drafted from
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


class _Growing:
    """The best nodes of one request so far, best first; ties keep the order of drafting."""

    def __init__(self, anchor: int) -> None:
        self.nodes = np.empty(0, _NODE)
        self.front = np.array([(ROOT, ROOT, ROOT, anchor, 0, 0.0)], _NODE)
        self.drafted = 0

    def grow(
        self,
        # [f, K] of `front`, which begins at row `start` of the frontier of all requests
        ids: np.ndarray,
        log_probs: np.ndarray,
        start: int,
        *,
        budget: int,
        frontier_width: int | None,
        least_score: float,
    ) -> None:
        """Drafts a level of at most `budget` nodes, keeps the best `budget` of all levels, and
        leaves in `front` those of the new level that were kept and have `least_score`."""
        depth = int(self.front["depth"][0]) + 1
        usable = np.logical_and.accumulate(np.isfinite(log_probs), axis=1)
        rows = np.nonzero(usable)[0]
        # Rounding can leave a sure token above 0; then it would outscore its parent.
        scores = self.front["score"][rows] + np.minimum(log_probs[usable], 0.0)
        # Stable sorts: of equal scores the one drafted first, hence the ancestor, stays first.
        order = np.argsort(-scores, kind="stable")[:budget]
        level = np.empty(len(order), _NODE)
        level["number"] = np.arange(self.drafted, self.drafted + len(order))
        level["parent"] = self.front["number"][rows[order]]
        level["row"] = start + rows[order]
        level["token"] = ids[usable][order]
        level["depth"] = depth
        level["score"] = scores[order]
        self.drafted += len(order)
        nodes = np.concatenate((self.nodes, level))
        self.nodes = nodes[np.argsort(-nodes["score"], kind="stable")[:budget]]
        front = self.nodes[(self.nodes["depth"] == depth) & (self.nodes["score"] >= least_score)]
        self.front = front[:frontier_width]

    def tree(self) -> DraftTree:
        """Returns the tree of all nodes that were kept."""
        index_of = np.full(self.drafted + 1, ROOT, np.int32)  # parent -1 looks itself up at the end
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
    tree_widths: Sequence[int],
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
        budgets: [R] most nodes of each tree.
        depths: [R] deepest level of each.
        tree_widths: [R] most children of one node; 1 drafts a chain.
        expand: drafts the children of a frontier; called with the anchors first.
        frontier_width: most nodes of one request expanded in one level; None for any number.
        min_node_prob: least probability of a node for its children to be drafted; those of
            anchors always are.
        min_level_prob: least sum over the nodes of a level that would be expanded, of all requests,
            for the next one to be drafted.
    """
    least_score = math.log(min_node_prob) if min_node_prob > 0 else -math.inf
    growing = [_Growing(anchor) for anchor in anchors]
    for level in range(max(depths, default=0)):
        expanded = [
            r
            for r, tree in enumerate(growing)
            if budgets[r] > 0 and level < depths[r] and len(tree.front)
        ]
        if not expanded:
            break
        counts = [len(growing[r].front) for r in expanded]
        front = np.concatenate([growing[r].front for r in expanded])
        if level and float(np.exp(front["score"]).sum()) < min_level_prob:
            break
        frontier = Frontier(
            requests=np.repeat(np.array(expanded, np.int64), counts),
            nodes=front["number"].copy(),
            parents=front["parent"].copy(),
            parent_rows=front["row"].copy(),
            token_ids=front["token"].copy(),
            depth=level,
        )
        ids, log_probs = expand(frontier)
        assert ids.shape == log_probs.shape and len(ids) == len(frontier), (ids.shape,)
        start = 0
        for r, count in zip(expanded, counts, strict=True):
            rows, ranks = slice(start, start + count), slice(0, tree_widths[r])
            growing[r].grow(
                ids[rows, ranks],
                log_probs[rows, ranks],
                start,
                budget=budgets[r],
                frontier_width=frontier_width,
                least_score=least_score,
            )
            start += count
    return [tree.tree() for tree in growing]


class BranchRows:
    """The expanded nodes of R requests as rows of trees whose row 0 is the anchor.

    A node's keys exist once it was expanded, so these rows are what deeper levels attend; a node
    attends its ancestors, all of which were expanded before it.
    """

    def __init__(self, num_requests: int) -> None:
        # Parent row of each row but the first, minus one: `DraftTree.parent_indices` of the rows
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
        """[R] int32 parents of the rows below each anchor."""
        return [np.array(parents, dtype=np.int32) for parents in self.parents]
