# SPDX-License-Identifier: Apache-2.0
"""Seams of attention backends and workers on CUDA."""

from __future__ import annotations

from vllm_specplug.seams.reasons import (
    BACKENDS,
    HAS_MASKS,
    SKIPS_VALUES,
    WHY_BACKEND,
    WHY_ISOLATED,
    attributes,
    overrides,
    uses,
)
from vllm_specplug.seams.seam import Register, Seam, SeamSet

_GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_QUANT_SCALES = "vllm.model_executor.layers.attention.attention:set_default_quant_scales"
_TRITON_IMPL = f"{BACKENDS}.triton_attn:TritonAttentionImpl"

ATTENTION_BACKENDS = SeamSet(
    Register(
        "gpu_backend",
        f"{BACKENDS}.registry:AttentionBackendEnum.{name}",
        WHY_BACKEND,
        HAS_MASKS,
        path=f"vllm_specplug.vllm_attention.gpu.{path}",
    )
    for name, path in (
        ("FLASH_ATTN", "TreeFlashAttentionBackend"),
        ("TRITON_ATTN", "TreeTritonAttentionBackend"),
    )
)

GPU_USES: tuple[Seam, ...] = (
    *attributes(
        "gpu_backend", WHY_BACKEND, HAS_MASKS, _QUANT_SCALES, "_q_scale", "_k_scale", "_v_scale"
    ),
    *attributes(
        "gpu_backend", WHY_BACKEND, HAS_MASKS, _TRITON_IMPL, "_k_scale_cache", "_v_scale_cache"
    ),
    *uses(
        "gpu_backend",
        WHY_BACKEND,
        HAS_MASKS,
        f"{_TRITON_IMPL}._ensure_scale_caches",
        _GPU_WORKER,
        "vllm.v1.attention.backend:AttentionCGSupport",
        "vllm.v1.attention.backend:AttentionType",
        f"{BACKENDS}.flash_attn:FlashAttentionBackend",
        f"{BACKENDS}.flash_attn:FlashAttentionImpl",
        f"{BACKENDS}.flash_attn:FlashAttentionMetadataBuilder",
        f"{BACKENDS}.triton_attn:TritonAttentionBackend",
        _TRITON_IMPL,
        f"{BACKENDS}.triton_attn:TritonAttentionMetadataBuilder",
        f"{BACKENDS}.fa_utils:flash_attn_varlen_func",
        f"{BACKENDS}.fa_utils:get_flash_attn_version",
        f"{BACKENDS}.fa_utils:get_scheduler_metadata",
        f"{BACKENDS}.fa_utils:reshape_and_cache_flash",
    ),
    *(
        seam
        for module, name in (("flash_attn", "Flash"), ("triton_attn", "Triton"))
        for owner, methods in (
            ("AttentionBackend", ("get_impl_cls", "get_builder_cls")),
            ("AttentionImpl", ("forward",)),
            ("AttentionMetadataBuilder", ("get_cudagraph_support",)),
        )
        for seam in overrides(
            "gpu_backend",
            f"{WHY_BACKEND}, and a full graph captured without tree rows would skip them",
            HAS_MASKS,
            f"{BACKENDS}.{module}:{name}{owner}",
            *methods,
        )
    ),
    *(
        seam
        for module, name in (("flash_attn", "Flash"), ("triton_attn", "Triton"))
        for seam in overrides(
            "gpu_backend",
            WHY_ISOLATED,
            SKIPS_VALUES,
            f"{BACKENDS}.{module}:{name}AttentionImpl",
            "do_kv_cache_update",
        )
    ),
    *overrides(
        "gpu_backend",
        "fused output quantisation would skip the tree rows",
        HAS_MASKS,
        _TRITON_IMPL,
        "fused_output_quant_supported",
    ),
    *overrides(
        "gpu_worker",
        "vLLM's documented hook for another runner, and the two points for warming up: before "
        "graphs are captured, and before vLLM reports kernels that compile late",
        "never: _make_model_runner is a public hook",
        _GPU_WORKER,
        "init_device",
        "_make_model_runner",
        "compile_or_warm_up_model",
        "_maybe_activate_jit_monitor",
    ),
)
