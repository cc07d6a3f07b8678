# SPDX-License-Identifier: Apache-2.0
"""New keys and values into vLLM's CPU cache, as `finite_values` says they may be stored.

The compiled kernel looks at the values where it writes them. vLLM's operator with
`isolate_nonfinite` before it reads them twice, and costs a decoding step more in Python than in
memory.
"""

from __future__ import annotations

import torch

from .cpu_layout import CpuKvLayout
from .extension import has_cpu_extension

_COMPILED = (torch.bfloat16, torch.float16, torch.float32)
# kMaxHeadSize in csrc/cpu/tree_attn.h
_MAX_HEAD_SIZE = 1024


def can_store_kv(kv_cache: torch.Tensor) -> bool:
    """Whether `store_kv` serves a layer's cache [num_blocks, Hkv, block_size, 2 * Dh]."""
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
    """Writes token i to slots[i]. Of a head whose values are not all finite, these are written as 0
    and the key as NaN.

    Raises:
        RuntimeError: if shapes or dtypes disagree, or for a slot past the cache.
    """
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    torch.ops.specplug.store_kv.default(key, value, kv_cache, slots, layout.kind_id, layout.tables)
