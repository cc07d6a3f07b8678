# SPDX-License-Identifier: Apache-2.0
"""What options of DeLS come to, with paths, defaults and weights worked out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_specplug.options import option_error


@dataclass(frozen=True)
class DelsSettings:
    """How a local head is fused with a block head: options with paths and defaults worked out."""

    path: str
    unigram_path: str | None
    """None where every beta is 0."""
    alpha: tuple[float, ...]
    """Weight of the local score at depths 1, 2, ..."""
    beta: tuple[float, ...]
    anchor_input: bool
    num_candidates: int
    """Tokens of each depth that the local head scores."""
    gate_table_bytes: int
    causal: bool | None = None
    """Causal (true) or bidirectional (false) attention inside the draft block. Default: what the
    checkpoint says (`causal_head`), bidirectional when it says nothing."""


def depth_weights(
    name: str, value: float | list[float], num_depths: int, *, first_depth: int
) -> tuple[float, ...]:
    """`alpha` or `beta` of depths 1..num_depths; 0 before `first_depth`, which is 1 or 2.

    Raises:
        ValueError: for a weight that is negative or not finite, and a list of another length.
    """
    corrected = num_depths - first_depth + 1
    if isinstance(value, list | tuple):
        if len(value) != corrected:
            raise option_error(
                name,
                value,
                f"a list needs one weight for each of the {corrected} depths that are corrected, "
                f"{first_depth}..{num_depths}, not {len(value)}",
                "Give that many, or one number for all",
            )
        weights = [float(weight) for weight in value]
    else:
        weights = [float(value)] * corrected
    if not all(math.isfinite(weight) and weight >= 0.0 for weight in weights):
        raise option_error(
            name,
            value,
            "weights must be finite and at least 0 (0 switches the term off)",
            "0.3 is the paper's choice",
        )
    return (0.0,) * (first_depth - 1) + tuple(weights)
