# SPDX-License-Identifier: Apache-2.0
"""Options of methods that draft with a block head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import (
    Capability,
    DraftPlan,
    MethodOptions,
    SharedOptions,
    TargetInfo,
)
from vllm_specplug.options import check_tree_depth

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_specplug.methods.block.config import BlockHeadConfig

BLOCK_NEEDS = frozenset({Capability.HIDDEN_STATES, Capability.CONTEXT_CACHE})


@dataclass(frozen=True)
class BlockSettings:
    """Resolved options of a block head."""

    causal: bool | None
    """Whether attention inside the block is causal; None for the checkpoint's mask."""


class BlockOptions(MethodOptions):
    """Options of methods with a block head."""

    causal: bool | None = None
    """Causal (true) or bidirectional (false) attention inside the draft block. Default: what
    the checkpoint's config says, or bidirectional if it says nothing."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        path = resolve_head_path(shared.model, method)
        head = self.inspect(path, target)
        depth = check_tree_depth(shared.tree_depth, head.block_size, head.num_draft_tokens)
        return DraftPlan(
            depth=min(depth, shared.num_speculative_tokens),
            head_path=str(path),
            hidden_layers=tuple(head.target_layer_ids),
            settings=self.settings(method, shared, target, head),
            needs=frozenset({Capability.CONTEXT_WINDOW} if any(head.windows) else ()),
        )

    def inspect(self, path: Path, target: TargetInfo) -> BlockHeadConfig:
        """Checks the head in folder `path` against its target, without the weights."""
        # Imported here: reading a head needs torch, which declarations must not import.
        from vllm_specplug.methods.block.checkpoint import inspect_block_head

        return inspect_block_head(path, target.text_config, causal=self.causal)

    def settings(
        self, method: str, shared: SharedOptions, target: TargetInfo, head: BlockHeadConfig
    ) -> BlockSettings:
        """Returns the settings that the drafter reads."""
        return BlockSettings(self.causal)
