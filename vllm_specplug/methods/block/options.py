# SPDX-License-Identifier: Apache-2.0
"""Options of methods that draft with a block head."""

from __future__ import annotations

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
    from vllm_specplug.methods.block.config import BlockHeadConfig
    from vllm_specplug.methods.local.settings import LocalTreeSettings

BLOCK_NEEDS = frozenset({Capability.HIDDEN_STATES, Capability.CONTEXT_CACHE})


class BlockKindOptions(MethodOptions):
    """Methods with a kind of block head have only the shared options."""

    def resolve(self, method: str, shared: SharedOptions, target: TargetInfo) -> DraftPlan:
        from vllm_specplug.methods.block.checkpoint import inspect_block_head, log_unused_parts

        path = resolve_head_path(shared.model, method)
        head = inspect_block_head(path, target.text_config, self.config_class())
        log_unused_parts(path, head)
        depth = check_tree_depth(
            shared.tree_depth,
            head.num_draft_tokens,
            f"this head drafts blocks of {head.block_size} slots",
        )
        return DraftPlan(
            depth=min(depth, shared.num_speculative_tokens),
            head_path=str(path),
            hidden_layers=tuple(head.target_layer_ids),
            settings=self.settings(method, shared, target, head),
            needs=frozenset({Capability.CONTEXT_WINDOW} if any(head.windows) else ()),
        )

    def config_class(self) -> type[BlockHeadConfig]:
        """Returns the class of the configs of the method's heads."""
        # Imported here: reading a head needs torch, which declarations must not import.
        from vllm_specplug.methods.block.config import BlockHeadConfig

        return BlockHeadConfig

    def settings(
        self, method: str, shared: SharedOptions, target: TargetInfo, head: BlockHeadConfig
    ) -> LocalTreeSettings | None:
        """Returns the settings that the drafter reads."""
        return None


class BlockOptions(BlockKindOptions):
    """Options of methods that draft with JetSpec and DFlash heads."""
