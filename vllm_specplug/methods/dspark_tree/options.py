# SPDX-License-Identifier: Apache-2.0
"""Options of DSpark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from vllm_specplug.drafting.method import SharedOptions, TargetInfo
from vllm_specplug.methods.block.options import BlockOptions
from vllm_specplug.options import option_error

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_specplug.methods.block.config import BlockHeadConfig


@dataclass(frozen=True)
class DSparkSettings:
    """How a DSpark head is run; `methods.local.tree.LocalTreeOptions`."""

    num_candidates: int
    """Tokens of each depth that the Markov head scores."""
    alpha: tuple[float, ...]
    """Weight of the Markov score at depths 1, 2, ...: 1, as the head was trained."""
    beta: tuple[float, ...]
    """Zeros: no unigram prior."""
    causal: bool | None = None
    confidence_weight: float = 0.0
    """Exponent of the confidence head's probabilities; 0: it is not read."""
    anchor_input: bool = True
    gate_table_bytes: int = 0


class DSparkOptions(BlockOptions):
    """A block head with its own Markov head."""

    local_candidates: int = Field(default=128, ge=1, le=4096)
    """Number of tokens per depth, the likeliest ones of the block head, that the local head scores;
    never fewer than `tree_width`."""
    confidence_weight: float = Field(default=0.5, ge=0, le=4)
    """Weight of the confidence head, where the checkpoint has one: the probabilities of a node's
    children are multiplied with its confidence in them to this power. 0 leaves it out."""

    def inspect(self, path: Path, target: TargetInfo) -> BlockHeadConfig:
        from vllm_specplug.methods.dspark_tree.checkpoint import inspect_dspark_head

        return inspect_dspark_head(path, target.text_config, causal=self.causal).block

    def settings(  # type: ignore[override]
        self, method: str, shared: SharedOptions, target: TargetInfo, head: BlockHeadConfig
    ) -> DSparkSettings:
        if shared.tree_builder != "best_first":
            raise option_error(
                "tree_builder",
                shared.tree_builder,
                f"method {method!r} scores every branch by itself, so only best_first",
                "Leave tree_builder out",
            )
        depths = head.num_draft_tokens
        return DSparkSettings(
            num_candidates=max(self.local_candidates, shared.tree_width),
            alpha=(1.0,) * depths,
            beta=(0.0,) * depths,
            causal=self.causal,
            confidence_weight=self.confidence_weight,
        )
