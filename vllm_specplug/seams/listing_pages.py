# SPDX-License-Identifier: Apache-2.0
"""Seams of KV caches: their size on a CPU, and pages that several groups share."""

from __future__ import annotations

from vllm_specplug.seams.reasons import SKIPS_VALUES, overrides, uses
from vllm_specplug.seams.seam import Seam, Wrap

_WHY = "cache groups with unlike heads share pages, so NaN keys of drafts may be read as values"

ZEROED_PAGES = Wrap(
    "zeroed_pages",
    "vllm.v1.engine.core:get_kv_cache_configs",
    _WHY,
    SKIPS_VALUES,
    make="vllm_specplug.engine.zeroed_pages:wrap_get_kv_cache_configs",
)

ZEROED_PAGES_USES: tuple[Seam, ...] = (
    *uses(
        "zeroed_pages",
        _WHY,
        SKIPS_VALUES,
        "vllm.v1.kv_cache_interface:AttentionSpec",
        "vllm.v1.kv_cache_interface:KVCacheConfig",
    ),
    *overrides(
        "zeroed_pages",
        _WHY,
        SKIPS_VALUES,
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        "needs_kv_cache_zeroing",
    ),
)

CPU_MEMORY_USES = uses(
    "cpu_memory",
    "vLLM refuses its default share of a CPU's memory if other processes use part of it",
    "vLLM sizes a CPU's KV cache by the free memory",
    "vllm.utils.cpu_resource_utils:get_allowed_cpu_list",
    "vllm.utils.cpu_resource_utils:get_memory_node_info",
)
