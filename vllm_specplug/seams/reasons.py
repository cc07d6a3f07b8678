# SPDX-License-Identifier: Apache-2.0
"""Reasons that several lists of seams share, and functions that make several seams at once."""

from __future__ import annotations

from vllm_specplug.seams.seam import InstanceAttribute, Overrides, Seam

REGISTRY = "https://github.com/vllm-project/vllm/issues/36219"
TREE = "https://github.com/vllm-project/vllm/issues/40809"
HAS_REGISTRY = f"vLLM has a proposer registry with typed options ({REGISTRY})"
HAS_TREES = f"vLLM takes per-node positions and masks ({TREE})"
HAS_MASKS = f"vLLM takes a mask per request ({TREE})"
HAS_CPU_KERNELS = (
    "the CPU build of vLLM has its own kernels (https://github.com/vllm-project/vllm/pull/55847)"
)
HAS_PROCESSORS = "vLLM's entry point for logits processors distinguishes the model runners"
HAS_DRAFT_LAYERS = "vLLM offers cache-only layers to proposers"
BACKENDS = "vllm.v1.attention.backends"
WHY_BACKEND = "stock attention has one causal mask; tree rows attend their ancestors"
WHY_ISOLATED = (
    "a NaN of a drafted token is stored so that only the rows that attend it read it; kernels "
    "multiply the values of other columns by 0"
)
SKIPS_VALUES = "kernels skip the values of columns that a row does not attend"


def uses(key: str, why: str, remove_when: str, *targets: str) -> list[Seam]:
    return [Seam(key, target, why, remove_when) for target in targets]


def overrides(key: str, why: str, remove_when: str, owner: str, *names: str) -> list[Seam]:
    return [Overrides(key, f"{owner}.{name}", why, remove_when) for name in names]


def attributes(key: str, why: str, remove_when: str, owner: str, *names: str) -> list[Seam]:
    return [InstanceAttribute(key, f"{owner}.{name}", why, remove_when) for name in names]
