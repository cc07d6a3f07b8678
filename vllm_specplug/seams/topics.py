# SPDX-License-Identifier: Apache-2.0
"""What the seams are for; several lists share some of these topics."""

from __future__ import annotations

from vllm_specplug.seams.seam import Topic

BACKENDS = "vllm.v1.attention.backends"
REGISTRY = "https://github.com/vllm-project/vllm/issues/36219"
TREE = "https://github.com/vllm-project/vllm/issues/40809"
HAS_REGISTRY = f"vLLM has a proposer registry with typed options ({REGISTRY})"
HAS_TREES = f"vLLM takes per-node positions and masks ({TREE})"
HAS_MASKS = f"vLLM takes a mask per request ({TREE})"
HAS_CPU_KERNELS = (
    "the CPU build of vLLM has its own kernels (https://github.com/vllm-project/vllm/pull/55847)"
)

PENALTY = Topic(
    "penalty_processor",
    "the contextual penalty applies with and without speculation; vLLM's entry point for "
    "processors loads one class into two incompatible runners",
    "vLLM's entry point for logits processors distinguishes the model runners",
)
ISOLATED = Topic(
    "isolated_values",
    "a NaN of a drafted token is stored so that only the rows that attend it read it; kernels "
    "multiply the values of other columns by 0",
    "kernels skip the values of columns that a row does not attend",
)
WEIGHT_UPDATES = Topic(
    "weight_updates",
    "weights are packed whenever they are loaded, and drafters copy the target's embedding and LM "
    "head, which vLLM replaces",
    f"a method may take part in a reload ({REGISTRY})",
)
