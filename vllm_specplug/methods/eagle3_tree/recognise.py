# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are EAGLE-3 heads, judged by their files.

Kinds that the reader refuses later are recognised too, so that the refusal can say why.
"""

from __future__ import annotations

from vllm_specplug.drafting.head_files import HeadFiles

# Tensors that no other head has together; the layer's name varies.
_TENSORS = ("hidden_norm.weight", "input_layernorm.weight", "self_attn.q_proj.weight")
_PREFIXES = ("midlayer.", "layers.0.")


def is_eagle3_head(head: HeadFiles) -> bool:
    """By the format's own word, else by tensors, else by the architecture.

    Architectures say little: some configs of trainers call the head a plain Llama.
    """
    if head.speculators_type is not None:
        return head.speculators_type in ("eagle3", "peagle")
    if head.tensors:
        return "fc.weight" in head.tensors and any(
            head.has_tensors(prefix + name for name in _TENSORS) for prefix in _PREFIXES
        )
    return any("eagle3" in name.lower() or "peagle" in name.lower() for name in head.architectures)
