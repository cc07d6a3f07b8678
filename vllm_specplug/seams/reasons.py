# SPDX-License-Identifier: Apache-2.0
"""What would let us drop a seam, and shorthands: shared by the lists."""

from __future__ import annotations

from vllm_specplug.seams.seam import Overrides, Seam

REGISTRY = "https://github.com/vllm-project/vllm/issues/36219"
TREE = "https://github.com/vllm-project/vllm/issues/40809"
HAS_REGISTRY = f"vLLM has a proposer registry with typed options ({REGISTRY})"
HAS_TREES = f"vLLM takes per-node positions and masks ({TREE})"
HAS_CPU_KERNELS = (
    "the CPU build of vLLM brings kernels of its own "
    "(https://github.com/vllm-project/vllm/pull/55847)"
)
WHY_CONTAINED = (
    "a drafted token's NaN is stored so that it only reaches the rows that attend it; kernels "
    "multiply the values of others by 0"
)
CONTAINED = "kernels leave out the values of columns that a row does not attend"


def uses(key: str, why: str, remove_when: str, *targets: str) -> list[Seam]:
    return [Seam(key, target, why, remove_when) for target in targets]


def overrides(key: str, why: str, remove_when: str, owner: str, *names: str) -> list[Seam]:
    return [Overrides(key, f"{owner}.{name}", why, remove_when) for name in names]
