# SPDX-License-Identifier: Apache-2.0
"""Resolved options of DeLS."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specplug.methods.local.settings import LocalTreeSettings


@dataclass(frozen=True, kw_only=True)
class DelsSettings(LocalTreeSettings):
    """Options of the fusion, with resolved paths."""

    path: str
    unigram_path: str | None
    """None if every beta is 0."""


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
