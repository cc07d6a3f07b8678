# SPDX-License-Identifier: Apache-2.0
"""Recognises LongSpec layers from checkpoint files."""

from __future__ import annotations

from vllm_specplug.drafting.head_files import HeadFiles


def is_longspec_head(head: HeadFiles) -> bool:
    """Returns whether a checkpoint is a LongSpec layer, by its tensors: published configs are
    copies of the target's. Prefixes vary."""
    return any(name.endswith("cross_attn.q_proj.weight") for name in head.tensors)
