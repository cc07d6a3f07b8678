# SPDX-License-Identifier: Apache-2.0
"""Seams of layers with multi-head latent attention.

Workers apply them if their target has such layers.
"""

from __future__ import annotations

from vllm_specplug.seams.reasons import (
    BACKENDS,
    HAS_DRAFT_LAYERS,
    HAS_MASKS,
    SKIPS_VALUES,
    WHY_ISOLATED,
    attributes,
    overrides,
    uses,
)
from vllm_specplug.seams.seam import Register, SeamSet

_LAYERS = "vllm.model_executor.layers.attention.mla_attention"
_MLA = "vllm.model_executor.layers.attention:MLAAttention"
_MOE = "vllm.model_executor.layers.fused_moe"
_MLA_WRAPPER = "vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper"
_WHY = (
    "vLLM expands the full context of a request with drafts and attends the drafts causally; tree "
    "rows attend their ancestors over the latent cache"
)
_WHY_RAGGED = "requests of any number of rows are decoded together, by a kernel with a mask per row"
_WHY_DRAFT_BACKEND = (
    "a backend that is asked for by name must serve latent rows, which draft layers do not have"
)
_WHY_BLOCK_SIZES = (
    "vLLM's latent caches have blocks of 16 tokens, which its other CPU backend refuses; draft "
    "layers use that backend"
)
_WHY_ROTARY = (
    "vLLM's CPU operator for rotary embeddings is wrong for queries of three dimensions, which "
    "these layers pass to it; targets that call it are refused"
)
_RIGHT_ROTARY = "vLLM's operator is right for them"
_WHY_ROUTING = (
    "compiled for a CPU, a router with a sigmoid and a bias is computed before its input; such "
    "targets are refused"
)
_RIGHT_ROUTING = "compiled and eager answers of plain vLLM agree for such targets"

_LAYER_ATTRIBUTES = attributes(
    "latent_backend",
    _WHY,
    HAS_MASKS,
    _MLA,
    "impl",
    "attn_backend",
    "indexer",
    "sliding_window",
    "use_sparse",
    "non_causal_multi_token_decode",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "kv_lora_rank",
)

_CPU_SEAMS = SeamSet(
    (
        Register(
            "latent_backend",
            f"{BACKENDS}.registry:AttentionBackendEnum.CPU_MLA",
            _WHY,
            HAS_MASKS,
            path="vllm_specplug.vllm_attention.latent.TreeCPUMLABackend",
        ),
        *uses(
            "latent_backend",
            _WHY,
            HAS_MASKS,
            f"{BACKENDS}.mla.cpu_mla:CPUMLABackend",
            f"{BACKENDS}.mla.cpu_mla:CPUMLAImpl",
            f"{_MLA}.forward_impl",
            f"{_LAYERS}:MLACommonDecodeMetadata",
            f"{_LAYERS}:MLACommonMetadata",
            f"{BACKENDS}.mla.prefill.base:MLAPrefillBackend.prepare_metadata",
        ),
        *overrides(
            "latent_backend",
            _WHY,
            HAS_MASKS,
            f"{BACKENDS}.mla.cpu_mla:CPUMLABackend",
            "get_impl_cls",
        ),
        *overrides(
            "latent_backend",
            _WHY,
            HAS_MASKS,
            f"{BACKENDS}.mla.cpu_mla:CPUMLAImpl",
            "forward_mqa",
        ),
        *overrides(
            "latent_backend",
            WHY_ISOLATED,
            SKIPS_VALUES,
            f"{BACKENDS}.mla.cpu_mla:CPUMLAImpl",
            "do_kv_cache_update",
        ),
        *_LAYER_ATTRIBUTES,
        *overrides(
            "latent_drafts",
            _WHY_BLOCK_SIZES,
            HAS_DRAFT_LAYERS,
            f"{BACKENDS}.cpu_attn:CPUAttentionBackend",
            "get_supported_kernel_block_sizes",
        ),
        *uses(
            "latent_drafts",
            _WHY_BLOCK_SIZES,
            HAS_DRAFT_LAYERS,
            "vllm.v1.attention.backend:MultipleOf",
        ),
        *uses("latent_rotary", _WHY_ROTARY, _RIGHT_ROTARY, _MLA_WRAPPER),
        *attributes(
            "latent_rotary",
            _WHY_ROTARY,
            _RIGHT_ROTARY,
            _MLA_WRAPPER,
            "mla_attn",
            "rotary_emb",
            "num_heads",
            "qk_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
        ),
        *uses("compiled_routing", _WHY_ROUTING, _RIGHT_ROUTING, f"{_MOE}:MoERunner"),
        *attributes(
            "compiled_routing", _WHY_ROUTING, _RIGHT_ROUTING, f"{_MOE}:MoERunner", "router"
        ),
        *attributes(
            "compiled_routing",
            _WHY_ROUTING,
            _RIGHT_ROUTING,
            f"{_MOE}.router.cpu_router:CPURouter",
            "scoring_func",
            "e_score_correction_bias",
        ),
    )
)

_GPU_SEAMS = SeamSet(
    (
        *(
            Register(
                "latent_gpu_backend",
                f"{BACKENDS}.registry:AttentionBackendEnum.{name}",
                _WHY,
                HAS_MASKS,
                path=f"vllm_specplug.vllm_attention.latent_gpu.{name}",
            )
            for name in (
                "TRITON_MLA",
                "FLASHMLA",
                "FLASH_ATTN_MLA",
                "FLASHINFER_MLA",
                "CUTLASS_MLA",
            )
        ),
        *uses(
            "latent_gpu_backend",
            _WHY_RAGGED,
            HAS_MASKS,
            f"{_LAYERS}:MLACommonMetadata",
            f"{_LAYERS}:QueryLenSupport",
            f"{_LAYERS}:MLACommonMetadataBuilder.reorder_batch_threshold",
            "vllm.v1.attention.backend:max_decode_query_len",
            "vllm.utils.import_utils:resolve_obj_by_qualname",
        ),
        *overrides(
            "latent_gpu_backend",
            _WHY,
            HAS_MASKS,
            f"{_LAYERS}:MLACommonBackend",
            "get_impl_cls",
            "get_builder_cls",
        ),
        *overrides(
            "latent_gpu_backend", _WHY, HAS_MASKS, f"{_LAYERS}:MLACommonImpl", "forward_mqa"
        ),
        *overrides(
            "latent_gpu_backend",
            WHY_ISOLATED,
            SKIPS_VALUES,
            "vllm.v1.attention.backend:MLAAttentionImpl",
            "do_kv_cache_update",
        ),
        *uses(
            "latent_gpu_backend",
            _WHY_DRAFT_BACKEND,
            HAS_DRAFT_LAYERS,
            "vllm.v1.kv_cache_interface:KVCacheSpecKind",
        ),
        *_LAYER_ATTRIBUTES,
    )
)

LATENT_SEAMS = {"cpu": _CPU_SEAMS, "cuda": _GPU_SEAMS}
"""By device."""
