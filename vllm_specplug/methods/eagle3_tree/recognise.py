# SPDX-License-Identifier: Apache-2.0
"""Recognises EAGLE-3 heads from checkpoint files.

It also recognises kinds that the reader refuses later with a reason.
"""

from __future__ import annotations

from vllm_specplug.drafting.head_files import HeadFiles

# No other head has all of these tensors. The layer's name varies.
_TENSORS = ("hidden_norm.weight", "input_layernorm.weight", "self_attn.q_proj.weight")
_PREFIXES = ("midlayer.", "layers.0.")


def is_eagle3_head(head: HeadFiles) -> bool:
    """Returns whether a checkpoint is an EAGLE-3 head, by its format, tensors or architecture.

    The architecture comes last, because some trainers' configs call the head a plain Llama.
    """
    if head.speculators_type is not None:
        return head.speculators_type in ("eagle3", "peagle")
    if head.tensors:
        return "fc.weight" in head.tensors and any(
            head.has_tensors(prefix + name for name in _TENSORS) for prefix in _PREFIXES
        )
    return any("eagle3" in name.lower() or "peagle" in name.lower() for name in head.architectures)
