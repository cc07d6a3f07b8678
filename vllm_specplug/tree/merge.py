# SPDX-License-Identifier: Apache-2.0
"""Merges several drafts of one request into one tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specplug.tree.draft_tree import ROOT, DraftTree


def merge_trees(trees: Sequence[DraftTree], budget: int) -> DraftTree:
    """Returns the union of `trees`, cut to its `budget` best nodes.

    Shared prefixes become shared nodes, so no node is verified twice. The score of a node is its
    best score in any tree. All trees must use the same kind of scores (cumulative log-probabilities
    that do not increase along a path). A node is kept only with its ancestors, which never score
    less.

    A tree that violates these rules is returned unmerged, so that `DraftTree.fault` reports it.
    """
    if not trees:
        return DraftTree.empty()
    if len(trees) == 1 and trees[0].num_nodes <= budget:
        return trees[0]
    index: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    scores: list[float] = []
    for tree in trees:
        merged: list[int] = []
        for token, parent, depth, score in zip(
            tree.token_ids.tolist(),
            tree.parent_indices.tolist(),
            tree.depths.tolist(),
            tree.scores.tolist(),
            strict=True,
        ):
            if not ROOT <= parent < len(merged):
                return tree
            key = (ROOT if parent == ROOT else merged[parent], token)
            highest = 0.0 if parent == ROOT else scores[key[0]]
            if not score <= highest:
                return tree
            node = index.get(key)
            if node is None:
                node = index[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                depths.append(depth)
                scores.append(score)
            elif score > scores[node]:
                scores[node] = score
            merged.append(node)
    # Ties keep the order of insertion, in which a parent comes before its children.
    kept = sorted(range(len(tokens)), key=lambda node: (-scores[node], node))[:budget]
    index_of = {node: i for i, node in enumerate(kept)}
    index_of[ROOT] = ROOT
    return DraftTree(
        token_ids=np.array([tokens[n] for n in kept], dtype=np.int64),
        parent_indices=np.array([index_of[parents[n]] for n in kept], dtype=np.int32),
        depths=np.array([depths[n] for n in kept], dtype=np.int32),
        scores=np.array([scores[n] for n in kept], dtype=np.float32),
    )
