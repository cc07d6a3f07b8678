# SPDX-License-Identifier: Apache-2.0
"""Stores new keys and values in vLLM's CPU cache by the rules of `finite_values`.

The compiled kernel checks values while it writes them. `isolate_nonfinite` before vLLM's operator
would read them twice, and its Python code would cost a decode step even more.
"""

from __future__ import annotations

import torch

from .cpu_layout import CpuKvLayout
from .extension import has_cpu_extension

_COMPILED = (torch.bfloat16, torch.float16, torch.float32)
# kMaxHeadSize in csrc/cpu/tree_attn.h
_MAX_HEAD_SIZE = 1024


def can_store_kv(kv_cache: torch.Tensor) -> bool:
    """Whether `store_kv` supports a layer's cache [num_blocks, Hkv, block_size, 2 * Dh]."""
    return (
        has_cpu_extension()
        and kv_cache.device.type == "cpu"
        and kv_cache.dtype in _COMPILED
        and kv_cache.dim() == 4
        and kv_cache.shape[3] <= 2 * _MAX_HEAD_SIZE
        and kv_cache.stride(3) == 1
        and kv_cache.stride(2) == kv_cache.shape[3]
    )


def store_kv(
    # [T, Hkv, Dh] of the cache's dtype
    key: torch.Tensor,
    value: torch.Tensor,
    # [num_blocks, Hkv, block_size, 2 * Dh]
    kv_cache: torch.Tensor,
    # int64 [T or more]: block * block_size + offset; nothing is stored below 0
    slots: torch.Tensor,
    layout: CpuKvLayout,
) -> None:
    """Writes token i to slots[i]. If a head's values are not all finite, these are written as 0 and
    its key as NaN.

    Raises:
        RuntimeError: if shapes or dtypes disagree, or for a slot past the cache.
    """
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    torch.ops.specplug.store_kv.default(key, value, kv_cache, slots, layout.kind_id, layout.tables)
