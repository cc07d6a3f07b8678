# SPDX-License-Identifier: Apache-2.0
"""The nodes of several trees as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_specplug.budget.cost_curve import Floats
from vllm_specplug.tree import ROOT, DraftTree

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_EMPTY = DraftTree.empty()
_NO_INTS = np.empty(0, np.int64)


@dataclass
class Nodes:
    """All nodes of the trees of R requests, one tree after another."""

    # [R] number of nodes of each tree
    counts: Ints
    # [N] index of each node's tree
    owners: Ints
    scores: npt.NDArray[np.float32]
    depths: Ints
    # [N] probability that the node is accepted with its whole path
    probabilities: Floats = field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> Nodes:
        """Returns the nodes of these trees, without probabilities."""
        counts = np.array([len(tree.token_ids) for tree in trees], np.int64)
        if not counts.any():
            return cls(counts, _NO_INTS, np.empty(0, np.float32), _NO_INTS)
        return cls(
            counts,
            np.arange(len(trees)).repeat(counts),
            np.concatenate([tree.scores for tree in trees]),
            np.concatenate([tree.depths for tree in trees]).astype(np.int64),
        )

    def counts_of(self, some: Bools) -> list[int]:
        """[R] number of nodes of each tree among `some` [N]."""
        counts: list[int] = np.bincount(self.owners[some], minlength=len(self.counts)).tolist()
        return counts

    def capped(self, caps: Ints) -> Floats:
        """[N] the probabilities, with zeros for all but the best `caps` nodes of each tree."""
        if not (self.counts > caps).any():
            return self.probabilities
        probabilities = self.probabilities.copy()
        starts = np.cumsum(self.counts) - self.counts
        for tree in np.flatnonzero(self.counts > caps):
            own = probabilities[starts[tree] : starts[tree] + self.counts[tree]]
            own[np.argsort(-own, kind="stable")[caps[tree] :]] = 0.0
        return probabilities

    def of_requests(self, requests: Ints) -> tuple[Floats, Ints, Ints]:
        """Returns probability, depth and request of the nodes of some requests. Requests are
        numbered by their place in `requests`."""
        place = np.full(len(self.counts), -1)
        place[requests] = np.arange(len(requests))
        owners = place[self.owners]
        inside = owners >= 0
        return self.probabilities[inside], self.depths[inside], owners[inside]

    def subtrees(self, trees: Sequence[DraftTree], kept: Bools) -> list[DraftTree]:
        """Returns the kept nodes [N] of each tree in their old order."""
        result = []
        first = 0
        sizes, counts = self.counts_of(kept), self.counts.tolist()
        for tree, size, count in zip(trees, sizes, counts, strict=True):
            if size == count:
                result.append(tree)
            elif size == 0:
                result.append(_EMPTY)
            else:
                own = kept[first : first + count]
                result.append(tree.prefix(size) if own[:size].all() else _subtree(tree, own))
            first += count
        return result


def _subtree(tree: DraftTree, kept: Bools) -> DraftTree:
    parents = tree.parent_indices
    # Rounding may rank a child before its parent. Such a child is dropped.
    while (orphans := kept & (parents != ROOT) & ~kept[parents]).any():
        kept = kept & ~orphans
    place = np.cumsum(kept) - 1
    parents = parents[kept]
    return DraftTree(
        token_ids=tree.token_ids[kept],
        parent_indices=np.where(parents == ROOT, ROOT, place[parents]).astype(np.int32),
        depths=tree.depths[kept],
        scores=tree.scores[kept],
    )
