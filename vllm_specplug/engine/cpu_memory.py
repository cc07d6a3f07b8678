# SPDX-License-Identifier: Apache-2.0
"""Limits the memory of CPU workers where vLLM's default does not fit.

Unless its KV cache size is set, vLLM's worker takes `gpu_memory_utilization` (0.92) of all memory.
It stops if less than that is free, as is usual on a small machine.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

_logger = logging.getLogger("vllm.specplug")

# Maximum memory that vLLM's other processes take between this check and the worker's.
_OTHER_PROCESSES = 2 << 30
_SHARE_OF_FREE = 0.75


def fit_to_free_memory(vllm_config: Any) -> None:
    """Lowers the memory share of CPU workers if vLLM would refuse its default.

    It keeps a share or a KV cache size that the user set.
    """
    cache = vllm_config.cache_config
    default = type(cache).gpu_memory_utilization
    if (
        vllm_config.device_config.device_type != "cpu"
        or cache.kv_cache_memory_bytes is not None
        or cache.gpu_memory_utilization != default
    ):
        return
    memory = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    default_bytes = memory.total_memory * default
    if default_bytes <= memory.available_memory - _OTHER_PROCESSES:
        return
    # All ranks may run on one node.
    worker_bytes = memory.available_memory * _SHARE_OF_FREE / vllm_config.parallel_config.world_size
    cache.gpu_memory_utilization = worker_bytes / memory.total_memory
    _logger.warning(
        "By default vLLM takes %.0f %% of a CPU's memory (%.1f GiB), but only %.1f GiB are free. "
        "Each worker takes %.1f GiB instead. Set VLLM_CPU_KVCACHE_SPACE to choose the size of the "
        "KV cache in GiB.",
        100 * default,
        default_bytes / 2**30,
        memory.available_memory / 2**30,
        worker_bytes / 2**30,
    )
