# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for the per-depth candidates that builders take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from vllm_specplug.tree import DraftTree, build_tree


@dataclass(frozen=True)
class Case:
    """Arguments of one `build_tree` call."""

    token_ids: np.ndarray  # [D, K]
    log_probs: np.ndarray  # [D, K]
    budget: int
    tree_width: int
    tree_depth: int
    hybrid_lambda: float

    def build(self, builder: str, **changes) -> DraftTree:
        return build_tree(
            builder,
            self.token_ids,
            self.log_probs,
            changes.get("budget", self.budget),
            tree_width=self.tree_width,
            tree_depth=self.tree_depth,
            hybrid_lambda=self.hybrid_lambda,
        )

    @property
    def depth(self) -> int:
        return min(self.tree_depth, self.log_probs.shape[0])

    @property
    def width(self) -> int:
        return min(self.tree_width, self.log_probs.shape[1])


@st.composite
def cases(draw: st.DrawFn, max_depth: int = 5, max_k: int = 5, max_budget: int = 40) -> Case:
    depth = draw(st.integers(1, max_depth))
    k = draw(st.integers(1, max_k))
    # Quarters of a nat are exact in float32 and make ties frequent; the free floats make none.
    logp = draw(
        st.sampled_from(
            [
                st.integers(-32, 0).map(lambda n: n / 4),
                st.floats(-12.0, 0.0, width=32),
            ]
        )
    )
    log_probs = [sorted(draw(st.lists(logp, min_size=k, max_size=k)))[::-1] for _ in range(depth)]
    token_ids = [draw(st.permutations(range(7)).map(lambda p: p[:k])) for _ in range(depth)]
    return Case(
        token_ids=np.array(token_ids, dtype=np.int64),
        log_probs=np.array(log_probs, dtype=np.float32),
        budget=draw(st.integers(0, max_budget)),
        tree_width=draw(st.integers(1, max_k + 1)),
        tree_depth=draw(st.integers(1, max_depth + 1)),
        hybrid_lambda=draw(st.sampled_from([0.0, 0.25, 2.0])),
    )
