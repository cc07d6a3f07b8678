# SPDX-License-Identifier: Apache-2.0
"""Trees from EAGLE-3 heads, run level by level.

vLLM's own method `eagle3` drafts chains with the same heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specplug.drafting.method import Capability, Method

if TYPE_CHECKING:
    from vllm_specplug.drafting.head_files import HeadFiles

# No other head has all of these tensors. The layer's name varies.
_TENSORS = ("hidden_norm.weight", "input_layernorm.weight", "self_attn.q_proj.weight")
_PREFIXES = ("midlayer.", "layers.0.")

METHOD = Method(
    name="eagle3_tree",
    summary="EAGLE-3 head over target features and its own states, level by level",
    options="vllm_specplug.methods.eagle3_tree.options:Eagle3Options",
    drafter="vllm_specplug.methods.eagle3_tree.drafter:Eagle3Drafter",
    needs=frozenset(
        {
            Capability.HIDDEN_STATES,
            Capability.NEXT_TOKENS,
            Capability.CONTEXT_CACHE,
        }
    ),
    recognises="vllm_specplug.methods.eagle3_tree:is_eagle3_head",
    train_commands=("vllm_specplug.methods.eagle3_tree.train.options",),
    presets={"smollm2": {"model": "heads/smollm2-135m-eagle3", "num_speculative_tokens": 16}},
)


def is_eagle3_head(head: HeadFiles) -> bool:
    """Returns whether a checkpoint is an EAGLE-3 head, by its format, tensors or architecture.

    It also recognises kinds that the reader refuses later with a reason. The architecture comes
    last, because some trainers' configs call the head a plain Llama.
    """
    if head.speculators_type is not None:
        return head.speculators_type in ("eagle3", "peagle")
    if head.tensors:
        return "fc.weight" in head.tensors and any(
            head.has_tensors(prefix + name for name in _TENSORS) for prefix in _PREFIXES
        )
    return any("eagle3" in name.lower() or "peagle" in name.lower() for name in head.architectures)
