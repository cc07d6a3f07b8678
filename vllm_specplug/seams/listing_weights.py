# SPDX-License-Identifier: Apache-2.0
"""The part of the list that concerns weights that are replaced while an engine lives."""

from __future__ import annotations

from vllm_specplug.seams.reasons import REGISTRY, overrides, uses
from vllm_specplug.seams.seam import Seam

_TAKES_PART = f"a method may take part in a reload ({REGISTRY})"

WEIGHT_USES: tuple[Seam, ...] = (
    *(
        seam
        for worker in ("gpu_worker:Worker", "cpu_worker:CPUWorker")
        for seam in overrides(
            "weight_updates",
            "weights are packed as often as they are loaded, and drafters copy the target's "
            "embedding and LM head, which vLLM replaces",
            _TAKES_PART,
            f"vllm.v1.worker.{worker}",
            "reload_weights",
            "update_weights",
            "finish_weight_update",
        )
    ),
    *uses(
        "draft_memory",
        "sleep of level 2 drops the pool of the weights, and nothing would load a draft head again",
        _TAKES_PART,
        "vllm.device_allocator:get_mem_allocator_instance",
    ),
)
