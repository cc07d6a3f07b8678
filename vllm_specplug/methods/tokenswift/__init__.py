# SPDX-License-Identifier: Apache-2.0
"""TokenSwift: the target drafts for itself, for very long outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplug.drafting.method import Capability, Method

if TYPE_CHECKING:
    from vllm_specplug.drafting.head_files import HeadFiles

METHOD = Method(
    name="tokenswift",
    summary="chained heads, or the target over a partial cache, and n-grams, for long outputs",
    options="vllm_specplug.methods.tokenswift.options:TokenSwiftOptions",
    drafter="vllm_specplug.methods.tokenswift.drafter:TokenSwiftDrafter",
    needs=frozenset({Capability.HIDDEN_STATES, Capability.TARGET_FORWARD}),
    recognises="vllm_specplug.methods.tokenswift:is_tokenswift_head",
    train_commands=("vllm_specplug.methods.tokenswift.train.options",),
    presets={"smollm2": {"model": "heads/smollm2-135m-tokenswift", "num_speculative_tokens": 16}},
)


def is_tokenswift_head(head: HeadFiles) -> bool:
    """Returns whether a checkpoint has TokenSwift heads, by its tensors.

    Medusa's own heads have no norm in front of their matrix.
    """
    return head.has_tensors(
        ("medusa_layers.0.linear.weight", "medusa_layers.0.input_layernorm.weight")
    )
