# SPDX-License-Identifier: Apache-2.0
"""Options of DeLS: how a local head is fused with a block head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplug.drafting.method import SharedOptions, TargetInfo
from vllm_specplug.methods.block.options import BlockOptions
from vllm_specplug.methods.dels.settings import DelsSettings
from vllm_specplug.options import option_error

if TYPE_CHECKING:
    from vllm_specplug.methods.block.config import BlockHeadConfig


class DelsOptions(BlockOptions):
    """A local head beside the block head."""

    local_head: str | None = None
    """Short-context head: a folder written by `specplug train dels`, or a released `.pt` file,
    which is converted to safetensors once."""
    unigram: str | None = None
    """Token counts behind the unigram prior. Default: `unigram.safetensors` or
    `loss_mask_unigram.pt` beside the local head."""
    alpha: float | list[float] = 0.3
    """Weight of the local score at depths 1, 2, ..."""
    beta: float | list[float] = 0.3
    """Weight of the unigram log-probability that is subtracted; same form as `alpha`."""
    anchor_input: bool | None = None
    """Whether the local head reads the last committed token before the drafted ones and therefore
    corrects depth 1 too. Default: what its checkpoint says; false for a released file."""

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
        return resolve_settings(self, shared.tree_width, head.num_draft_tokens, target.model_config)
