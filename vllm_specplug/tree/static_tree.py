# SPDX-License-Identifier: Apache-2.0
"""Trees of a fixed shape: every node of a level has the same number of children."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specplug.tree.draft_tree import ROOT, DraftTree, as_scores


def build_static(
    # [D, K], best first
    token_ids: npt.NDArray[np.int64],
    # [D, K]
    log_probs: npt.NDArray[np.float32],
    widths: Sequence[int],
) -> DraftTree:
    """The tree in which every node of depth d - 1 has the widths[d - 1] likeliest tokens of depth
    d as children, level by level.

    Levels beyond D and candidates beyond K, or of no finite log-probability, are left out.
    TokenSwift's [1, 3, 3, 3] has 40 nodes and 27 leaves.
    """
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    scores: list[float] = []
    level = [ROOT]
    for depth, (width, ids, logps) in enumerate(
        zip(widths, token_ids.tolist(), log_probs.tolist(), strict=False), 1
    ):
        ranks = [r for r in range(min(width, len(ids))) if np.isfinite(logps[r])]
        following = []
        for parent in level:
            base = scores[parent] if parent != ROOT else 0.0
            for rank in ranks:
                following.append(len(tokens))
                tokens.append(ids[rank])
                parents.append(parent)
                depths.append(depth)
                scores.append(base + min(logps[rank], 0.0))
        level = following
    return DraftTree(
        token_ids=np.array(tokens, dtype=np.int64),
        parent_indices=np.array(parents, dtype=np.int32),
        depths=np.array(depths, dtype=np.int32),
        scores=as_scores(scores),
    )
