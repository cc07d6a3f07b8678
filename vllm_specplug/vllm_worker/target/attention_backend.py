# SPDX-License-Identifier: Apache-2.0
"""Chooses vLLM's attention backend on CUDA for trees."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specplug.kernels.cuda_contract import TOKEN_SCALE_CACHES
from vllm_specplug.seams import ATTENTION_BACKENDS

# vLLM's attention backends that support tree rows.
TREE_BACKENDS = (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN)


def claim_attention_backend(vllm_config: Any) -> None:
    """Registers the tree backends and chooses one if the user named none: FlashAttention, or Triton
    for float32 and for caches with scales per token, which FlashAttention does not support.

    Seam: gpu_backend.

    Raises:
        ValueError: for a backend that does not support tree rows or the cache.
    """
    attention = vllm_config.attention_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    backends: tuple[AttentionBackendEnum, ...] = TREE_BACKENDS
    if cache_dtype in TOKEN_SCALE_CACHES:
        backends = (AttentionBackendEnum.TRITON_ATTN,)
    if attention.backend is None:
        is_float32 = vllm_config.model_config.dtype == torch.float32
        attention.backend = AttentionBackendEnum.TRITON_ATTN if is_float32 else backends[0]
    if attention.backend not in backends:
        names = " or ".join(b.name for b in backends)
        over = f" over kv_cache_dtype={cache_dtype!r}" if backends != TREE_BACKENDS else ""
        raise ValueError(
            f"--attention-backend {attention.backend.name} cannot verify trees{over}. Use {names}, "
            "or leave it out."
        )
    ATTENTION_BACKENDS.apply()
