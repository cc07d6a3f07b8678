# SPDX-License-Identifier: Apache-2.0
"""The part of the list that concerns weights that are replaced while an engine lives."""

from __future__ import annotations

from vllm_specplug.seams.reasons import REGISTRY, overrides, uses
from vllm_specplug.seams.seam import Seam

_TAKES_PART = f"a method may take part in a reload ({REGISTRY})"


def _exchanges(worker: str) -> list[Seam]:
    """What a worker of vLLM does when weights are exchanged."""
    return overrides(
        "weight_updates",
        "weights are packed as often as they are loaded, and drafters copy the target's "
        "embedding and LM head, which vLLM replaces",
        _TAKES_PART,
        f"vllm.v1.worker.{worker}",
        "reload_weights",
        "update_weights",
        "finish_weight_update",
    )


WEIGHT_USES = uses(
    "draft_memory",
    "sleep of level 2 drops the pool of the weights, and nothing would load a draft head again",
    _TAKES_PART,
    "vllm.device_allocator:get_mem_allocator_instance",
)
# Apart: the module of vLLM's CPU worker replaces torch's events and pinned memory when imported.
CPU_WEIGHT_USES = _exchanges("cpu_worker:CPUWorker")
GPU_WEIGHT_USES = _exchanges("gpu_worker:Worker")
