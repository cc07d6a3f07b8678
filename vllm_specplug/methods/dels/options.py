# SPDX-License-Identifier: Apache-2.0
"""Options of DeLS: how a local head is fused with a block head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from vllm_specplug.drafting.method import SharedOptions, TargetInfo
from vllm_specplug.methods.block.options import BlockOptions
from vllm_specplug.options import option_error

if TYPE_CHECKING:
    from vllm_specplug.methods.block.config import BlockHeadConfig


@dataclass(frozen=True)
class DelsSettings:
    """How a local head is fused with a block head: options with paths and defaults worked out."""

    path: str
    unigram_path: str | None
    """None where every beta is 0."""
    unigram_smoothing: float
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


class DelsOptions(BlockOptions):
    """A local head beside the block head."""

    local_head: str | None = None
    """Short-context head: a folder written by `specplug train dels`, or a released `.pt` file,
    which is converted to safetensors once."""
    unigram: str | None = None
    """Token counts behind the unigram prior. Default: `unigram.safetensors` or
    `loss_mask_unigram.pt` beside the local head."""
    unigram_smoothing: float = Field(default=1.0, ge=0.0, le=1000.0)
    """Added to every count of the unigram prior. With 0, tokens that were never seen get the
    smallest nonzero probability."""
    alpha: float | list[float] = 0.3
    """Weight of the local score at depths 1, 2, ..."""
    beta: float | list[float] = 0.3
    """Weight of the unigram log-probability that is subtracted; same form as `alpha`."""
    anchor_input: bool | None = None
    """Whether the local head reads the last committed token before the drafted ones and therefore
    corrects depth 1 too. Default: what its checkpoint says; false for a released file."""
    local_candidates: int = Field(default=128, ge=1, le=4096)
    """Number of tokens per depth, the likeliest ones of the block head, that the local head scores;
    never fewer than `tree_width`."""
    gate_table_mb: int = Field(default=64, ge=0, le=65536)
    """Memory limit in MiB for the precomputed input gates of a GRU local head; if they do not fit,
    they are computed in each step."""

    def settings(  # type: ignore[override]
        self, method: str, shared: SharedOptions, target: TargetInfo, head: BlockHeadConfig
    ) -> DelsSettings:
        from vllm_specplug.methods.dels.resolve import resolve_settings

        if not self.local_head:
            raise option_error(
                "local_head",
                self.local_head,
                f"method {method!r} fuses a block head with a local head",
                'Give its folder, e.g. "local_head": "/path/to/local-head"; without one use '
                "method ddtree, or jetspec for a causal head",
            )
        if shared.tree_builder != "best_first":
            raise option_error(
                "tree_builder",
                shared.tree_builder,
                f"method {method!r} scores every branch by itself, so only best_first",
                "Leave tree_builder out, or use method ddtree",
            )
        return resolve_settings(self, shared.tree_width, head.num_draft_tokens, target.model_config)


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
