# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints hold TokenSwift heads, judged by their files."""

from __future__ import annotations

from vllm_specplug.drafting.head_files import HeadFiles


def is_tokenswift_head(head: HeadFiles) -> bool:
    """By its tensors. Medusa's own heads have no norm in front of their matrix."""
    return head.has_tensors(
        ("medusa_layers.0.linear.weight", "medusa_layers.0.input_layernorm.weight")
    )
