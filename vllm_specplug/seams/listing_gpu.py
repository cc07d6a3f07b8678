# SPDX-License-Identifier: Apache-2.0
"""The part of the list that concerns CUDA."""

from __future__ import annotations

from vllm_specplug.seams.reasons import (
    CONTAINED,
    TREE,
    WHY_CONTAINED,
    overrides,
    uses,
)
from vllm_specplug.seams.seam import InstanceAttribute, Register, Seam, SeamSet

_GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_BACKENDS = "vllm.v1.attention.backends"
_QUANT_SCALES = "vllm.model_executor.layers.attention.attention:set_default_quant_scales"
_TRITON_IMPL = f"{_BACKENDS}.triton_attn:TritonAttentionImpl"
_WHY_BACKEND = "stock attention has one causal mask; tree rows need their ancestors"

ATTENTION_BACKENDS = SeamSet(
    Register(
        "gpu_backend",
        f"{_BACKENDS}.registry:AttentionBackendEnum.{name}",
        _WHY_BACKEND,
        f"vLLM takes a mask per request ({TREE})",
        path=f"vllm_specplug.vllm_attention.gpu.{path}",
    )
    for name, path in (
        ("FLASH_ATTN", "TreeFlashAttentionBackend"),
        ("TRITON_ATTN", "TreeTritonAttentionBackend"),
    )
)

GPU_USES: tuple[Seam, ...] = (
    *(
        InstanceAttribute("gpu_backend", f"{_QUANT_SCALES}.{name}", _WHY_BACKEND, TREE)
        for name in ("_q_scale", "_k_scale", "_v_scale")
    ),
    *(
        InstanceAttribute("gpu_backend", f"{_TRITON_IMPL}.{name}", _WHY_BACKEND, TREE)
        for name in ("_k_scale_cache", "_v_scale_cache")
    ),
    *uses(
        "gpu_backend",
        _WHY_BACKEND,
        f"vLLM takes a mask per request ({TREE})",
        f"{_TRITON_IMPL}._ensure_scale_caches",
        _GPU_WORKER,
        "vllm.v1.attention.backend:AttentionCGSupport",
        "vllm.v1.attention.backend:AttentionType",
        f"{_BACKENDS}.flash_attn:FlashAttentionBackend",
        f"{_BACKENDS}.flash_attn:FlashAttentionImpl",
        f"{_BACKENDS}.flash_attn:FlashAttentionMetadataBuilder",
        f"{_BACKENDS}.triton_attn:TritonAttentionBackend",
        _TRITON_IMPL,
        f"{_BACKENDS}.triton_attn:TritonAttentionMetadataBuilder",
        f"{_BACKENDS}.fa_utils:flash_attn_varlen_func",
        f"{_BACKENDS}.fa_utils:get_flash_attn_version",
        f"{_BACKENDS}.fa_utils:get_scheduler_metadata",
        f"{_BACKENDS}.fa_utils:reshape_and_cache_flash",
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
            f"{_WHY_BACKEND}, and a full graph captured without them would leave them out",
            f"vLLM takes a mask per request ({TREE})",
            f"{_BACKENDS}.{module}:{name}{owner}",
            *methods,
        )
    ),
    *(
        seam
        for module, name in (("flash_attn", "Flash"), ("triton_attn", "Triton"))
        for seam in overrides(
            "gpu_backend",
            WHY_CONTAINED,
            CONTAINED,
            f"{_BACKENDS}.{module}:{name}AttentionImpl",
            "do_kv_cache_update",
        )
    ),
    *overrides(
        "gpu_backend",
        "fused output quantisation would skip the tree rows",
        f"vLLM takes a mask per request ({TREE})",
        _TRITON_IMPL,
        "fused_output_quant_supported",
    ),
    *overrides(
        "gpu_worker",
        "the documented seam for a runner of one's own, and the two moments for warming up: before "
        "graphs are captured, and before vLLM watches for kernels that still compile",
        "never: _make_model_runner is a public seam",
        _GPU_WORKER,
        "init_device",
        "_make_model_runner",
        "compile_or_warm_up_model",
        "_maybe_activate_jit_monitor",
    ),
)
