# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are LongSpec layers, judged by their files."""

from __future__ import annotations

from vllm_specplug.drafting.head_files import HeadFiles


def is_longspec_head(head: HeadFiles) -> bool:
    """By its tensors: published configs are copies of the target's. Prefixes vary."""
    return any(name.endswith("cross_attn.q_proj.weight") for name in head.tensors)
