# SPDX-License-Identifier: Apache-2.0
"""Options of DSpark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_specplug.drafting.method import SharedOptions, TargetInfo
from vllm_specplug.methods.block.options import BlockOptions
from vllm_specplug.methods.local import LOCAL_CANDIDATES

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_specplug.methods.block.config import BlockHeadConfig


@dataclass(frozen=True)
class DSparkSettings:
    """Resolved options of a block head with a Markov head; implements
    `methods.local.tree.LocalTreeOptions`."""

    num_candidates: int
    """Number of tokens per depth that the Markov head scores."""
    alpha: tuple[float, ...]
    """Weight of the Markov score at depths 1, 2, ...: 1, as in training."""
    beta: tuple[float, ...]
    """Weight of the unigram prior at each depth: 0, because there is no prior."""
    causal: bool | None = None
    anchor_input: bool = True
    gate_table_bytes: int = 0


class DSparkOptions(BlockOptions):
    """Options of a block head with its own Markov head."""

    def inspect(self, path: Path, target: TargetInfo) -> BlockHeadConfig:
        from vllm_specplug.methods.dspark_tree.checkpoint import inspect_dspark_head

        return inspect_dspark_head(path, target.text_config, causal=self.causal).block

    def settings(  # type: ignore[override]
        self, method: str, shared: SharedOptions, target: TargetInfo, head: BlockHeadConfig
    ) -> DSparkSettings:
        depths = head.num_draft_tokens
        return DSparkSettings(
            num_candidates=max(LOCAL_CANDIDATES, shared.tree_width),
            alpha=(1.0,) * depths,
            beta=(0.0,) * depths,
            causal=self.causal,
        )
