# SPDX-License-Identifier: Apache-2.0
"""The nodes of several trees as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_specplug.budget import Bools, Floats, Ints
from vllm_specplug.tree import ROOT, DraftTree

_EMPTY = DraftTree.empty()
_NO_INTS = np.empty(0, np.int64)


@dataclass
class Nodes:
    """All nodes of the trees of R requests, ordered by tree."""

    # [R] number of nodes of each tree
    counts: Ints
    # [N] index of each node's tree
    owners: Ints
    scores: npt.NDArray[np.float32]
    depths: Ints
    # [N] probability that the node is accepted with its path
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

    def counts_of(self, selected: Bools) -> list[int]:
        """Returns [R] the number of selected nodes [N] of each tree."""
        counts: list[int] = np.bincount(self.owners[selected], minlength=len(self.counts)).tolist()
        return counts

    def capped(self, caps: Ints) -> Floats:
        """Returns [N] the probabilities, 0 for all but the best `caps` nodes of each tree."""
        if not (self.counts > caps).any():
            return self.probabilities
        probabilities = self.probabilities.copy()
        starts = np.cumsum(self.counts) - self.counts
        for tree in np.flatnonzero(self.counts > caps):
            own = probabilities[starts[tree] : starts[tree] + self.counts[tree]]
            own[np.argsort(-own, kind="stable")[caps[tree] :]] = 0.0
        return probabilities

    def of_requests(self, requests: Ints) -> tuple[Floats, Ints, Ints]:
        """Returns probability, depth and request of the nodes of some requests, as indices in
        `requests`."""
        index_of = np.full(len(self.counts), -1)
        index_of[requests] = np.arange(len(requests))
        owners = index_of[self.owners]
        is_included = owners >= 0
        return self.probabilities[is_included], self.depths[is_included], owners[is_included]

    def subtrees(self, trees: Sequence[DraftTree], kept: Bools) -> list[DraftTree]:
        """Returns the trees of the kept nodes [N], in their old order."""
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
    return tree.subset(np.flatnonzero(kept))
