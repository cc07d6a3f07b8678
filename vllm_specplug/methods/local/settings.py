# SPDX-License-Identifier: Apache-2.0
"""Resolved options of the fusion of a local head with a block head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

LOCAL_CANDIDATES = 128
"""Number of likeliest tokens of the block head that a local head scores at each depth. Wider trees
score as many as their width."""


@dataclass(frozen=True, kw_only=True)
class LocalTreeSettings:
    """Weights and limits of the fusion."""

    alpha: tuple[float, ...]
    """Weight of the local score at depths 1, 2, ..."""
    beta: tuple[float, ...]
    """Weight of the subtracted unigram log-probability at depths 1, 2, ..."""
    num_candidates: int
    """Number of tokens that the local head scores at each depth."""
    gate_table_bytes: int = 0
    """Maximum bytes of the precomputed input gates of a GRU."""

    @classmethod
    def of_own_head(cls, num_depths: int, num_candidates: int, first_depth: int = 1) -> Self:
        """Returns the settings of a head that was trained with its block: weight 1 from
        `first_depth` on, and no prior."""
        return cls(
            alpha=(0.0,) * (first_depth - 1) + (1.0,) * (num_depths - first_depth + 1),
            beta=(0.0,) * num_depths,
            num_candidates=num_candidates,
        )
