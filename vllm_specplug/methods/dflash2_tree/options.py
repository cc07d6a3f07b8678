# SPDX-License-Identifier: Apache-2.0
"""Options of DFlash2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplug.drafting.method import SharedOptions, TargetInfo
from vllm_specplug.methods.block.options import BlockOptions
from vllm_specplug.methods.dspark_tree.options import DSparkSettings

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_specplug.methods.dflash2_tree.config import DFlash2Config


class DFlash2Options(BlockOptions):
    """Options of a block head with a candidate selector."""

    def inspect(self, path: Path, target: TargetInfo) -> DFlash2Config:
        from vllm_specplug.methods.dflash2_tree.checkpoint import inspect_dflash2_head

        return inspect_dflash2_head(path, target.text_config, causal=self.causal)

    def settings(  # type: ignore[override]
        self, method: str, shared: SharedOptions, target: TargetInfo, head: DFlash2Config
    ) -> DSparkSettings:
        depths = head.num_draft_tokens
        return DSparkSettings(
            num_candidates=head.selector_top_k,
            alpha=(1.0,) * depths,
            beta=(0.0,) * depths,
            causal=self.causal,
        )
