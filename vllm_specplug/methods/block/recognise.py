# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are block heads, and of which kind, by their files alone.

Kinds that a reader refuses later are recognised too, so that the refusal can say why.
"""

from __future__ import annotations

from vllm_specplug.drafting.head_files import HeadFiles
from vllm_specplug.methods.block.config import (
    ARCHITECTURES,
    SPECULATORS_ARCHITECTURES,
    block_containers,
    stated_mask,
)

# Tensors that every block head has. Other kinds have `fc.weight` too, but norm features per layer.
_TENSORS = ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight")


def is_causal_block_head(head: HeadFiles) -> bool:
    """Whether a checkpoint is a JetSpec head."""
    return _is_block_head(head) and _is_causal(head)


def is_bidirectional_block_head(head: HeadFiles) -> bool:
    """Whether a checkpoint is a DFlash head."""
    return _is_block_head(head) and not _is_causal(head)


def _is_block_head(head: HeadFiles) -> bool:
    if head.speculators_type is not None:
        return head.speculators_type == "dflash"
    if head.architectures:
        return bool({*ARCHITECTURES, *SPECULATORS_ARCHITECTURES} & set(head.architectures))
    return head.has_tensors(_TENSORS)


def _is_causal(head: HeadFiles) -> bool:
    if head.speculators_type is not None:
        return False
    try:
        return stated_mask(head.config, block_containers(head.config)) is True
    except (ValueError, TypeError, AttributeError):
        return False  # whoever reads the head refuses the value
