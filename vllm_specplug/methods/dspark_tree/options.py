# SPDX-License-Identifier: Apache-2.0
"""Options of DSpark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplug.drafting.method import SharedOptions, TargetInfo
from vllm_specplug.methods.block.options import BlockOptions
from vllm_specplug.methods.local.settings import LOCAL_CANDIDATES, LocalTreeSettings

if TYPE_CHECKING:
    from vllm_specplug.methods.dspark_tree.config import DSparkConfig


class DSparkOptions(BlockOptions):
    def config_class(self) -> type[DSparkConfig]:
        from vllm_specplug.methods.dspark_tree.config import DSparkConfig

        return DSparkConfig

    def settings(  # type: ignore[override]
        self, method: str, shared: SharedOptions, target: TargetInfo, head: DSparkConfig
    ) -> LocalTreeSettings:
        return LocalTreeSettings.of_own_head(
            head.num_draft_tokens,
            max(LOCAL_CANDIDATES, shared.tree_width),
            1 + head.pure_draft_prefix_len,
        )
