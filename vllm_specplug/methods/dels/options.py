# SPDX-License-Identifier: Apache-2.0
"""Options of DeLS, which fuses a local head with a block head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplug.drafting.method import SharedOptions, TargetInfo
from vllm_specplug.methods.block.options import BlockOptions
from vllm_specplug.options import option_error

if TYPE_CHECKING:
    from vllm_specplug.methods.block.config import BlockHeadConfig
    from vllm_specplug.methods.dels.resolve import DelsSettings


class DelsOptions(BlockOptions):
    """Options of a block head and its local head."""

    local_head: str | None = None
    """The local (short-context) head: a folder that `specplug train dels` wrote, or a released
    `.pt` file. The `config.json` beside the weights (for a released file, a JSON file of its name)
    sets the fusion weights; token counts are in the same folder."""

    def settings(
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
        return resolve_settings(self, shared.tree_width, head.num_draft_tokens, target.text_config)
