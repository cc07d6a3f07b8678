# SPDX-License-Identifier: Apache-2.0
"""The part of the list that concerns KV caches: their size on a CPU, and pages that several groups
share. `listing` has the whole."""

from __future__ import annotations

from vllm_specplug.seams.reasons import CONTAINED, uses
from vllm_specplug.seams.seam import Overrides, Seam, Wrap

_WHY = "groups of unlike heads share pages, where drafts' keys that are NaN become values"

ZEROED_PAGES = Wrap(
    "zeroed_pages",
    "vllm.v1.engine.core:get_kv_cache_configs",
    _WHY,
    CONTAINED,
    make="vllm_specplug.engine.zeroed_pages:with_zeroed_pages",
)

ZEROED_PAGES_USES: tuple[Seam, ...] = (
    *uses(
        "zeroed_pages",
        _WHY,
        CONTAINED,
        "vllm.v1.kv_cache_interface:AttentionSpec",
        "vllm.v1.kv_cache_interface:KVCacheConfig",
    ),
    Overrides(
        "zeroed_pages",
        "vllm.v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing",
        _WHY,
        CONTAINED,
    ),
)

CPU_MEMORY_USES: tuple[Seam, ...] = (
    *uses(
        "cpu_memory",
        "vLLM's default share of a CPU's memory is refused where other processes use some",
        "vLLM sizes a CPU's KV cache by what is free",
        "vllm.utils.cpu_resource_utils:get_allowed_cpu_list",
        "vllm.utils.cpu_resource_utils:get_memory_node_info",
    ),
)
