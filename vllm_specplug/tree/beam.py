# SPDX-License-Identifier: Apache-2.0
"""Trees of drafters that draft level by level, each node conditioned on its whole branch.

Letters: R requests, F frontier nodes of all requests, K candidates of one node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplug.tree.draft_tree import ROOT, DraftTree

# Levels of the paper's dynamic beam, and of smaller budgets.
BEAM_PRESETS: dict[int, tuple[int, ...]] = {
    68: (4, 16, 16, 16, 16),
    32: (4, 8, 8, 6, 6),
    16: (3, 4, 4, 3, 2),
    8: (2, 2, 2, 2),
}


def default_beam_widths(budget: int) -> tuple[int, ...]:
    """Level widths for a node budget: the largest preset that fits, or a chain."""
    for size, widths in BEAM_PRESETS.items():
        if size <= budget:
            return widths
    return (1,) * budget


@dataclass(frozen=True)
class Frontier:
    """Nodes whose children are drafted next, requests in order, nodes of one in order."""

    # [F] index into the requests
    requests: np.ndarray
    # [F] node index within the request's tree so far, ROOT (-1) for the anchor
    nodes: np.ndarray
    # [F] node index of the parent; ROOT for anchors and for children of the root
    parents: np.ndarray
    # [F]
    token_ids: np.ndarray
    # levels drafted so far: 0 when the frontier holds the anchors
    depth: int

    def __len__(self) -> int:
        return len(self.nodes)


# frontier -> candidate token ids int64 [F, K], their log-probabilities float32 [F, K]
Expand = Callable[[Frontier], tuple[np.ndarray, np.ndarray]]


class _Growing:
    """One request's tree while it grows."""

    def __init__(self, anchor: int) -> None:
        self.anchor = anchor
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.scores: list[float] = []

    def tree(self, budget: int) -> DraftTree:
        """The `budget` best nodes; an ancestor never scores less than its descendants."""
        kept = range(len(self.tokens))
        if len(self.tokens) > budget:
            # A stable sort: of equal scores the ancestor, which came first, stays first.
            order = np.argsort(-np.asarray(self.scores), kind="stable")[:budget]
            kept = np.sort(order).tolist()
        place = {node: i for i, node in enumerate(kept)}
        place[ROOT] = ROOT
        return DraftTree(
            token_ids=np.array([self.tokens[n] for n in kept], dtype=np.int64),
            parent_indices=np.array([place[self.parents[n]] for n in kept], dtype=np.int32),
            depths=np.array([self.depths[n] for n in kept], dtype=np.int32),
            scores=np.array([self.scores[n] for n in kept], dtype=np.float32),
        )


def draft_level_by_level(
    anchors: Sequence[int],
    budgets: Sequence[int],
    depths: Sequence[int],
    tree_widths: Sequence[int],
    expand: Expand,
    *,
    beam_widths: Sequence[int] | None = None,
    frontier_width: int = 16,
) -> list[DraftTree]:
    """Trees of R requests, one call of `expand` a level.

    With `beam_widths` the published dynamic beam: level d keeps the `beam_widths[d]` best
    children, by cumulative log-probability, of all nodes of the level before; those that are not
    expanded stay as leaves. Without, best-first under the node budget: every candidate competes
    with all drafted so far, and a node is expanded only while it is among the best `budget`. No
    descendant of another node could enter the tree, so the result is the exact best-first tree
    unless a level had more than `frontier_width` such nodes.

    Args:
        anchors: [R] tokens at the roots.
        budgets: [R] most nodes of each tree.
        depths: [R] deepest level of each.
        tree_widths: [R] most children of one node; 1 drafts a chain.
        expand: drafts the children of a frontier; called with the anchors first. The log-
            probabilities must not be positive.
        beam_widths: widths of the levels, or None.
        frontier_width: most nodes of one request expanded in one level, without `beam_widths`.
    """
    growing = [_Growing(anchor) for anchor in anchors]
    levels = max(depths, default=0)
    if beam_widths is not None:
        levels = min(levels, len(beam_widths))
    fronts: list[list[int]] = [
        [ROOT] if min(budgets[r], depths[r]) > 0 else [] for r in range(len(anchors))
    ]
    for level in range(levels):
        frontier = _frontier(growing, fronts, level)
        if not len(frontier):
            break
        ids, log_probs = expand(frontier)
        assert ids.shape == log_probs.shape and len(ids) == len(frontier), (ids.shape,)
        at = 0
        for r, front in enumerate(fronts):
            rows = slice(at, at + len(front))
            at += len(front)
            if not front:
                continue
            tree = growing[r]
            most = budgets[r] if beam_widths is None else beam_widths[level]
            ranks = slice(0, tree_widths[r])
            new = _grow(tree, front, ids[rows, ranks], log_probs[rows, ranks], most, level + 1)
            if level + 1 >= depths[r]:
                fronts[r] = []
            elif beam_widths is None:
                fronts[r] = _promising(tree, new, budgets[r])[:frontier_width]
            else:
                fronts[r] = new
    return [tree.tree(budgets[r]) for r, tree in enumerate(growing)]


def _frontier(growing: list[_Growing], fronts: list[list[int]], depth: int) -> Frontier:
    pairs = [(r, node) for r, front in enumerate(fronts) for node in front]
    return Frontier(
        requests=np.array([r for r, _ in pairs], dtype=np.int64),
        nodes=np.array([n for _, n in pairs], dtype=np.int64),
        parents=np.array(
            [ROOT if n == ROOT else growing[r].parents[n] for r, n in pairs], dtype=np.int64
        ),
        token_ids=np.array(
            [growing[r].anchor if n == ROOT else growing[r].tokens[n] for r, n in pairs],
            dtype=np.int64,
        ),
        depth=depth,
    )


def _grow(
    tree: _Growing,
    front: list[int],
    # [f, K]
    ids: np.ndarray,
    log_probs: np.ndarray,
    most: int,
    depth: int,
) -> list[int]:
    """Adds the `most` best candidates as nodes, best first; returns their indices."""
    above = np.array([0.0 if n == ROOT else tree.scores[n] for n in front], dtype=np.float32)
    scores = (above[:, None] + log_probs).ravel()
    order = np.argsort(-scores, kind="stable")[:most]
    start = len(tree.tokens)
    for flat in order.tolist():
        if not np.isfinite(scores[flat]):
            break
        row, rank = divmod(flat, ids.shape[1])
        tree.tokens.append(int(ids[row, rank]))
        tree.parents.append(front[row])
        tree.depths.append(depth)
        tree.scores.append(float(scores[flat]))
    return list(range(start, len(tree.tokens)))


def _promising(tree: _Growing, new: list[int], budget: int) -> list[int]:
    """Those of the newest nodes that are among the best `budget` of all."""
    if len(tree.scores) <= budget:
        return new
    worst = np.partition(np.asarray(tree.scores), -budget)[-budget]
    return [n for n in new if tree.scores[n] >= worst]


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
