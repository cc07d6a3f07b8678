# SPDX-License-Identifier: Apache-2.0
"""Options of DFlash2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplug.drafting.method import SharedOptions, TargetInfo
from vllm_specplug.methods.block.options import BlockKindOptions
from vllm_specplug.methods.local.settings import LocalTreeSettings

if TYPE_CHECKING:
    from vllm_specplug.methods.dflash2_tree.config import DFlash2Config


class DFlash2Options(BlockKindOptions):
    def config_class(self) -> type[DFlash2Config]:
        from vllm_specplug.methods.dflash2_tree.config import DFlash2Config

        return DFlash2Config

    def settings(  # type: ignore[override]
        self, method: str, shared: SharedOptions, target: TargetInfo, head: DFlash2Config
    ) -> LocalTreeSettings:
        return LocalTreeSettings.of_own_head(head.num_draft_tokens, head.selector_top_k)
