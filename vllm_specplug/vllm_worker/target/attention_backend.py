# SPDX-License-Identifier: Apache-2.0
"""Chooses vLLM's attention backend on CUDA for trees."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from vllm_specplug.kernels.cuda_contract import TOKEN_SCALE_CACHES
from vllm_specplug.seams.listing_attention import ATTENTION_BACKENDS, LATENT_SEAMS
from vllm_specplug.vllm_worker.start_up import use_seams

# vLLM's attention backends that support tree rows.
TREE_BACKENDS = (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN)


def claim_attention_backend(vllm_config: Any) -> None:
    """Registers the tree backends and chooses one if the user named none: FlashAttention, or Triton
    for float32 and for caches with scales per token, which FlashAttention does not support.

    Seam: attention_backend.

    Raises:
        ValueError: for a backend that does not support tree rows or the cache.
    """
    if vllm_config.model_config.use_mla:
        _claim_latent_backends(vllm_config)
        return
    attention = vllm_config.attention_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    backends: tuple[AttentionBackendEnum, ...] = TREE_BACKENDS
    if cache_dtype in TOKEN_SCALE_CACHES:
        backends = (AttentionBackendEnum.TRITON_ATTN,)
    if attention.backend is None:
        attention.backend = _default_of(backends, vllm_config)
    if attention.backend not in backends:
        names = " or ".join(b.name for b in backends)
        over = f" over kv_cache_dtype={cache_dtype!r}" if backends != TREE_BACKENDS else ""
        raise ValueError(
            f"--attention-backend {attention.backend.name} cannot verify trees{over}. Use {names}, "
            "or leave it out."
        )
    ATTENTION_BACKENDS.apply()


def _default_of(
    backends: tuple[AttentionBackendEnum, ...], vllm_config: Any
) -> AttentionBackendEnum:
    """Returns the first of `backends`, or Triton for float32, which FlashAttention lacks."""
    is_float32 = vllm_config.model_config.dtype == torch.float32
    return AttentionBackendEnum.TRITON_ATTN if is_float32 else backends[0]


def _claim_latent_backends(vllm_config: Any) -> None:
    """Registers the tree backends for latent attention, of which vLLM or the user chooses one, and
    chooses one for draft layers, which have keys and values.

    Seam: latent_backend.
    """
    # Compiled, it would store rows without the attention backend.
    vllm_config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = False
    kind = KVCacheSpecKind.FULL_ATTENTION.value
    chosen = vllm_config.attention_config.backend_per_kind
    chosen.setdefault(kind, _default_of(TREE_BACKENDS, vllm_config))
    ATTENTION_BACKENDS.apply()
    use_seams("latent attention", LATENT_SEAMS["cuda"])
