# SPDX-License-Identifier: Apache-2.0
"""Resolved options of DeLS."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DelsSettings:
    """Options of the fusion of a local head with a block head, with resolved paths and defaults."""

    path: str
    unigram_path: str | None
    """None if every beta is 0."""
    alpha: tuple[float, ...]
    """Weight of the local score at depths 1, 2, ..."""
    beta: tuple[float, ...]
    anchor_input: bool
    num_candidates: int
    """Number of tokens that the local head scores at each depth."""
    gate_table_bytes: int
    causal: bool | None = None
    """Causal (true) or bidirectional (false) attention inside the draft block. None stands for what
    the checkpoint's config says, or bidirectional if it says nothing."""


def depth_weights(
    name: str, value: float | list[float], num_depths: int, *, first_depth: int
) -> tuple[float, ...]:
    """Returns `alpha` or `beta` of depths 1..num_depths; 0 before `first_depth`, which is 1 or 2.

    Raises:
        ValueError: for a list of another length.
    """
    corrected = num_depths - first_depth + 1
    weights = value if isinstance(value, list) else [value] * corrected
    if len(weights) != corrected:
        raise ValueError(
            f"local head config: {name} = {value!r}, legal: one number, or one for each of the "
            f"{corrected} depths that are corrected, {first_depth}..{num_depths}; correct the "
            "config.json of the local head"
        )
    return (0.0,) * (first_depth - 1) + tuple(float(weight) for weight in weights)
