# SPDX-License-Identifier: Apache-2.0
"""Seams of weights that are replaced while an engine runs."""

from __future__ import annotations

from vllm_specplug.seams.reasons import REGISTRY, overrides, uses
from vllm_specplug.seams.seam import Seam

_TAKES_PART = f"a method may take part in a reload ({REGISTRY})"


def _weight_updates(worker: str) -> list[Seam]:
    """The methods of a vLLM worker that replace weights."""
    return overrides(
        "weight_updates",
        "weights are packed whenever they are loaded, and drafters copy the target's embedding and "
        "LM head, which vLLM replaces",
        _TAKES_PART,
        f"vllm.v1.worker.{worker}",
        "reload_weights",
        "update_weights",
        "finish_weight_update",
    )


WEIGHT_USES = uses(
    "draft_memory",
    "sleep level 2 frees the pool of the weights, and vLLM would not reload a draft head",
    _TAKES_PART,
    "vllm.device_allocator:get_mem_allocator_instance",
)
# Separate lists: importing vLLM's CPU worker replaces torch's events and pinned memory.
CPU_WEIGHT_USES = _weight_updates("cpu_worker:CPUWorker")
GPU_WEIGHT_USES = _weight_updates("gpu_worker:Worker")
