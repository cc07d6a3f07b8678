# SPDX-License-Identifier: Apache-2.0
"""Resolves and checks the options of a local head before the engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specplug.methods.dels.checkpoint import inspect_local_head, resolve_local_head
from vllm_specplug.methods.dels.unigram import (
    RELEASED_UNIGRAM_NAME,
    UNIGRAM_NAME,
    load_unigram,
    log_prior,
)
from vllm_specplug.methods.local.settings import LOCAL_CANDIDATES, LocalTreeSettings

if TYPE_CHECKING:
    from vllm_specplug.methods.dels.options import DelsOptions

# Maximum bytes of a GRU head's table of input gates. Larger ones are computed in each step.
_GATE_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class DelsSettings(LocalTreeSettings):
    """Options of the fusion, with resolved paths."""

    path: str
    unigram_path: str | None
    """None if every beta is 0."""


def resolve_settings(
    options: DelsOptions, tree_width: int, num_draft_tokens: int, text_config: Any
) -> DelsSettings:
    """Returns the options of method dels with resolved paths, defaults and weights.

    Args:
        num_draft_tokens: number of depths that the block head drafts.
        text_config: the target's text config.

    Raises:
        ValueError: for a local head or counts of another target, weights of other depths, and a
            missing prior.
    """
    assert options.local_head is not None
    config = inspect_local_head(options.local_head, text_config)
    file = resolve_local_head(options.local_head)
    first_depth = 1 if config.anchor_input else 2
    alpha, beta = (
        _depth_weights(name, getattr(config, name), num_draft_tokens, first_depth=first_depth)
        for name in ("alpha", "beta")
    )
    return DelsSettings(
        path=str(file.resolve()),
        unigram_path=_unigram_path(file, text_config) if any(beta) else None,
        alpha=alpha,
        beta=beta,
        num_candidates=max(LOCAL_CANDIDATES, tree_width),
        gate_table_bytes=_GATE_TABLE_BYTES,
    )


def _unigram_path(local_head: Path, text_config: Any) -> str:
    beside = [local_head.parent / name for name in (UNIGRAM_NAME, RELEASED_UNIGRAM_NAME)]
    found = [path for path in beside if path.is_file()]
    if not found:
        raise ValueError(
            f"local head {str(local_head)!r}: its beta is not 0, and there is no {UNIGRAM_NAME} "
            "beside it. Copy the counts that `specplug train dels` wrote beside the head, or set "
            "beta to 0 in its config.json."
        )
    path = found[0]
    # Refuses counts of a larger vocabulary before the engine starts.
    log_prior(load_unigram(path), int(text_config.vocab_size))
    return str(path.resolve())


def _depth_weights(
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
