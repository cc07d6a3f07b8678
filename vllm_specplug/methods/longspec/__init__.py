# SPDX-License-Identifier: Apache-2.0
"""LongSpec: one draft layer, run level by level, with constant memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplug.drafting.method import Capability, Method

if TYPE_CHECKING:
    from vllm_specplug.drafting.head_files import HeadFiles

METHOD = Method(
    name="longspec",
    summary="one layer over a window and the target's own cache, level by level",
    options="vllm_specplug.methods.longspec.options:LongSpecOptions",
    drafter="vllm_specplug.methods.longspec.drafter:LongSpecDrafter",
    needs=frozenset({Capability.WINDOW, Capability.TARGET_CACHE}),
    recognises="vllm_specplug.methods.longspec:is_longspec_head",
    train_commands=("vllm_specplug.methods.longspec.train.cli",),
    presets={"smollm2": {"model": "heads/smollm2-135m-longspec", "num_speculative_tokens": 16}},
)


def is_longspec_head(head: HeadFiles) -> bool:
    """Returns whether a checkpoint is a LongSpec layer, by its tensors: published configs are
    copies of the target's. Prefixes vary."""
    return any(name.endswith("cross_attn.q_proj.weight") for name in head.tensors)
