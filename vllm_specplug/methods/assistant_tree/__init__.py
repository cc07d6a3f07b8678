# SPDX-License-Identifier: Apache-2.0
"""Trees from the assistants that are published with Gemma 4.

vLLM's own method `mtp` drafts chains with the same checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplug.drafting.method import Capability, Method

if TYPE_CHECKING:
    from vllm_specplug.drafting.head_files import HeadFiles

METHOD = Method(
    name="assistant_tree",
    summary="Gemma 4's assistant over the target's own caches, level by level",
    options="vllm_specplug.methods.assistant_tree.options:AssistantOptions",
    drafter="vllm_specplug.methods.assistant_tree.drafter:AssistantDrafter",
    needs=frozenset({Capability.OUTPUT_STATES, Capability.TARGET_CACHE}),
    recognises="vllm_specplug.methods.assistant_tree:is_assistant",
)


def is_assistant(head: HeadFiles) -> bool:
    """Returns whether a checkpoint is an assistant, by its projections to and from the target's
    states."""
    return head.has_tensors(("pre_projection.weight", "post_projection.weight"))
