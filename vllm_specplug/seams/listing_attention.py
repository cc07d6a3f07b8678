# SPDX-License-Identifier: Apache-2.0
"""Seams of layers: attention over keys and values, recurrent states, and latent caches.

Workers apply the last two if their target has such layers.
"""

from __future__ import annotations

from vllm_specplug.seams.seam import Members, Register, Seam, SeamSet, Topic, Wrap

_BACKENDS = "vllm.v1.attention.backends"
_REGISTRY = f"{_BACKENDS}.registry:AttentionBackendEnum"
_OWN = "vllm_specplug.vllm_attention"

# -- keys and values -------------------------------------------------------------------------------

_ATTENTION = Topic(
    "attention_backend",
    "stock attention has one causal mask; tree rows attend their ancestors, and a full graph "
    "captured without tree rows would skip them",
)
_ISOLATED = Topic(
    "isolated_values",
    "a NaN of a drafted token is stored so that only the rows that attend it read it; kernels "
    "multiply the values of other columns by 0",
)

CPU_BACKENDS = SeamSet(
    (Register(_ATTENTION, f"{_REGISTRY}.CPU_ATTN", path=f"{_OWN}.cpu.TreeCPUAttentionBackend"),)
)
CPU_MEMBERS: tuple[Seam, ...] = (
    Members(
        _ATTENTION,
        f"{_BACKENDS}.cpu_attn:CPUAttentionBackend",
        "get_impl_cls forward_includes_kv_cache_update",
    ),
    Members(
        _ATTENTION,
        f"{_BACKENDS}.cpu_attn:CPUAttentionBackendImpl",
        "forward kv_sharing_target_layer_name",
    ),
    Members(_ATTENTION, f"{_BACKENDS}.cpu_attn:CPUAttentionMetadata", "slot_mapping"),
    Members(_ISOLATED, f"{_BACKENDS}.cpu_attn:CPUAttentionBackendImpl", "do_kv_cache_update"),
    Members(
        _ATTENTION,
        "vllm.model_executor.layers.quantization.kv_cache:BaseKVCacheMethod",
        "_k_scale_float _v_scale_float",
    ),
)

ATTENTION_BACKENDS = SeamSet(
    Register(_ATTENTION, f"{_REGISTRY}.{name}", path=f"{_OWN}.gpu.{path}")
    for name, path in (
        ("FLASH_ATTN", "TreeFlashAttentionBackend"),
        ("TRITON_ATTN", "TreeTritonAttentionBackend"),
    )
)
GPU_MEMBERS: tuple[Seam, ...] = (
    *(
        Members(topic, f"{_BACKENDS}.{module}:{name}{owner}", members)
        for module, name in (("flash_attn", "Flash"), ("triton_attn", "Triton"))
        for topic, owner, members in (
            (_ATTENTION, "AttentionBackend", "get_impl_cls get_builder_cls"),
            (_ATTENTION, "AttentionImpl", "forward"),
            (_ATTENTION, "AttentionMetadataBuilder", "get_cudagraph_support"),
            (_ISOLATED, "AttentionImpl", "do_kv_cache_update"),
        )
    ),
    Members(
        _ATTENTION,
        "vllm.model_executor.layers.attention.attention:set_default_quant_scales",
        "_q_scale _k_scale _v_scale",
    ),
    Members(
        _ATTENTION,
        f"{_BACKENDS}.triton_attn:TritonAttentionImpl",
        "_ensure_scale_caches _k_scale_cache _v_scale_cache",
    ),
    Members(
        Topic("attention_backend", "fused output quantisation would skip the tree rows"),
        f"{_BACKENDS}.triton_attn:TritonAttentionImpl",
        "fused_output_quant_supported",
    ),
)

# -- recurrent states ------------------------------------------------------------------------------

_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
_GDN_BUILDER = f"{_BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder"
_STATES = Topic(
    "state_rows",
    "vLLM keeps one recurrent state per draft token, in the order of a chain; trees keep one per "
    "request and apply the accepted path",
)


def _block_size(platform: str) -> Wrap:
    return Wrap(
        _STATES,
        f"{platform}.update_block_size_for_backend",
        make="vllm_specplug.vllm_worker.target.state_layers:without_draft_states",
    )


# On every device.
STATE_SEAMS = SeamSet(
    (
        Register(
            _STATES,
            f"{_BACKENDS}.registry:MambaAttentionBackendEnum.GDN_ATTN",
            path=f"{_OWN}.state_rows.TreeGDNBackend",
        ),
        Wrap(_STATES, f"{_GDN}._forward_core", make=f"{_OWN}.state_rows:wrap_device_core"),
        Members(
            Topic(
                "state_blocks",
                "with prefix caching vLLM copies states between blocks with Triton kernels, chosen "
                "by the number of accepted drafts",
            ),
            "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState",
            "preprocess_state postprocess_state _mamba_state_idx_gpu",
        ),
        Members(_STATES, f"{_BACKENDS}.gdn_attn:GDNAttentionBackend", "get_builder_cls"),
        Members(
            _STATES,
            _GDN_BUILDER,
            "build get_cudagraph_support speculative_config use_spec_decode num_spec",
        ),
        Members(
            _STATES,
            _GDN,
            "get_state_shape get_state_dtype num_spec num_k_heads num_v_heads tp_size activation "
            "conv1d dt_bias A_log enable_fused_gdn_spec_decode",
        ),
    )
)
CPU_STATE_SEAMS = SeamSet(
    (
        Wrap(
            _STATES,
            "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
            make=f"{_OWN}.state_rows:wrap_cpu_core",
        ),
        Members(
            _STATES,
            "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
            "_unpacked_conv_weight",
        ),
        _block_size("vllm.platforms.cpu:CpuPlatform"),
        Members(_STATES, _GDN, "rearrange_mixed_qkv"),
    )
)
# On CUDA.
DEVICE_STATE_SEAMS = SeamSet(
    (
        _block_size("vllm.platforms.interface:Platform"),
        Members(_STATES, _GDN_BUILDER, "_build_chunk_metadata"),
    )
)

# -- latent caches ---------------------------------------------------------------------------------

_MLA = "vllm.model_executor.layers.attention.mla_attention"
_MOE = "vllm.model_executor.layers.fused_moe"
_LATENT = Topic(
    "latent_backend",
    "vLLM expands the full context of a request with drafts and attends the drafts causally; tree "
    "rows attend their ancestors over the latent cache",
)
_ROUTING = Topic(
    "compiled_routing",
    "compiled for a CPU, a router with a sigmoid and a bias is computed before its input; such "
    "targets are refused",
)
_LATENT_LAYER = Members(
    _LATENT,
    "vllm.model_executor.layers.attention:MLAAttention",
    "impl attn_backend indexer sliding_window use_sparse non_causal_multi_token_decode num_heads "
    "num_kv_heads head_size kv_lora_rank",
)

LATENT_SEAMS = {
    "cpu": SeamSet(
        (
            Register(_LATENT, f"{_REGISTRY}.CPU_MLA", path=f"{_OWN}.latent.TreeCPUMLABackend"),
            Members(_LATENT, f"{_BACKENDS}.mla.cpu_mla:CPUMLABackend", "get_impl_cls"),
            Members(_LATENT, f"{_BACKENDS}.mla.cpu_mla:CPUMLAImpl", "forward_mqa"),
            Members(_ISOLATED, f"{_BACKENDS}.mla.cpu_mla:CPUMLAImpl", "do_kv_cache_update"),
            Members(_LATENT, f"{_BACKENDS}.mla.prefill.base:MLAPrefillBackend", "prepare_metadata"),
            _LATENT_LAYER,
            Members(
                Topic(
                    "latent_drafts",
                    "vLLM's latent caches have blocks of 16 tokens, which its other CPU backend "
                    "refuses; draft layers use that backend",
                ),
                f"{_BACKENDS}.cpu_attn:CPUAttentionBackend",
                "get_supported_kernel_block_sizes",
            ),
            Members(
                Topic(
                    "latent_rotary",
                    "vLLM's CPU operator for rotary embeddings is wrong for queries of three "
                    "dimensions, which these layers pass to it; targets that call it are refused",
                ),
                "vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper",
                "mla_attn rotary_emb num_heads qk_head_dim qk_nope_head_dim qk_rope_head_dim",
            ),
            Members(_ROUTING, f"{_MOE}:MoERunner", "router"),
            Members(
                _ROUTING,
                f"{_MOE}.router.cpu_router:CPURouter",
                "scoring_func e_score_correction_bias",
            ),
        )
    ),
    "cuda": SeamSet(
        (
            *(
                Register(_LATENT, f"{_REGISTRY}.{name}", path=f"{_OWN}.latent_gpu.{name}")
                for name in (
                    "TRITON_MLA",
                    "FLASHMLA",
                    "FLASH_ATTN_MLA",
                    "FLASHINFER_MLA",
                    "CUTLASS_MLA",
                )
            ),
            Members(_LATENT, f"{_MLA}:MLACommonBackend", "get_impl_cls get_builder_cls"),
            Members(_LATENT, f"{_MLA}:MLACommonImpl", "forward_mqa"),
            Members(_ISOLATED, "vllm.v1.attention.backend:MLAAttentionImpl", "do_kv_cache_update"),
            Members(
                Topic(
                    "latent_backend",
                    "requests of any number of rows are decoded together, by a kernel with a mask "
                    "per row",
                ),
                f"{_MLA}:MLACommonMetadataBuilder",
                "reorder_batch_threshold",
            ),
            _LATENT_LAYER,
        )
    ),
}
"""By device."""
