# SPDX-License-Identifier: Apache-2.0
"""The part of the list that concerns layers with multi-head latent attention; `listing` has the
whole. In place in workers whose target has such layers."""

from __future__ import annotations

from vllm_specplug.seams.reasons import CONTAINED, TREE, WHY_CONTAINED, overrides, uses
from vllm_specplug.seams.seam import InstanceAttribute, Register, SeamSet

_BACKENDS = "vllm.v1.attention.backends"
_LAYERS = "vllm.model_executor.layers.attention.mla_attention"
_MLA = "vllm.model_executor.layers.attention:MLAAttention"
_WHY = (
    "vLLM expands the whole context for a request with drafts, and attends them causally; tree "
    "rows are decoded over the latent cache, among their ancestors"
)
_UNTIL = f"vLLM takes a mask per request ({TREE})"

_WHY_ROTARY = (
    "vLLM's CPU operator for rotary embeddings is wrong for queries of three dimensions, which "
    "these layers give it; where it is called, no answer can be compared"
)
_RIGHT_ROTARY = "vLLM's operator is right for them"
_WHY_ROUTING = (
    "compiled for a CPU, a router with a sigmoid and a bias is computed before its input, and no "
    "answer can be compared"
)
_RIGHT_ROUTING = "compiled and eager answers of plain vLLM agree for such targets"

LATENT_SEAMS = SeamSet(
    (
        Register(
            "latent_backend",
            f"{_BACKENDS}.registry:AttentionBackendEnum.CPU_MLA",
            _WHY,
            _UNTIL,
            path="vllm_specplug.vllm_attention.latent.TreeCPUMLABackend",
        ),
        *uses(
            "latent_backend",
            _WHY,
            _UNTIL,
            f"{_BACKENDS}.mla.cpu_mla:CPUMLABackend",
            f"{_BACKENDS}.mla.cpu_mla:CPUMLAImpl",
            f"{_MLA}.forward_impl",
            f"{_LAYERS}:MLACommonDecodeMetadata",
            f"{_LAYERS}:MLACommonMetadata",
            f"{_BACKENDS}.mla.prefill.base:MLAPrefillBackend.prepare_metadata",
        ),
        *overrides(
            "latent_backend",
            _WHY,
            _UNTIL,
            f"{_BACKENDS}.mla.cpu_mla:CPUMLABackend",
            "get_impl_cls",
        ),
        *overrides(
            "latent_backend",
            _WHY,
            _UNTIL,
            f"{_BACKENDS}.mla.cpu_mla:CPUMLAImpl",
            "forward_mqa",
        ),
        *overrides(
            "latent_backend",
            WHY_CONTAINED,
            CONTAINED,
            f"{_BACKENDS}.mla.cpu_mla:CPUMLAImpl",
            "do_kv_cache_update",
        ),
        *(
            InstanceAttribute("latent_backend", f"{_MLA}.{name}", _WHY, _UNTIL)
            for name in (
                "impl",
                "attn_backend",
                "indexer",
                "sliding_window",
                "use_sparse",
                "non_causal_multi_token_decode",
                "num_heads",
                "num_kv_heads",
                "head_size",
            )
        ),
        *overrides(
            "latent_drafts",
            "vLLM's latent caches have blocks of 16 tokens, which its other CPU kernel does not "
            "take; draft layers' pages are none of its business",
            "vLLM offers cache-only layers to proposers",
            f"{_BACKENDS}.cpu_attn:CPUAttentionBackend",
            "get_supported_kernel_block_sizes",
        ),
        *uses(
            "latent_drafts",
            "vLLM's latent caches have blocks of 16 tokens",
            "vLLM offers cache-only layers to proposers",
            "vllm.v1.attention.backend:MultipleOf",
        ),
        *uses(
            "latent_rotary",
            _WHY_ROTARY,
            _RIGHT_ROTARY,
            "vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper",
        ),
        *(
            InstanceAttribute(
                "latent_rotary",
                f"vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper.{name}",
                _WHY_ROTARY,
                _RIGHT_ROTARY,
            )
            for name in (
                "mla_attn",
                "rotary_emb",
                "num_heads",
                "qk_head_dim",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
            )
        ),
        *uses(
            "compiled_routing",
            _WHY_ROUTING,
            _RIGHT_ROUTING,
            "vllm.model_executor.layers.fused_moe:MoERunner",
        ),
        InstanceAttribute(
            "compiled_routing",
            "vllm.model_executor.layers.fused_moe:MoERunner.router",
            _WHY_ROUTING,
            _RIGHT_ROUTING,
        ),
        *(
            InstanceAttribute(
                "compiled_routing",
                f"vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter.{name}",
                _WHY_ROUTING,
                _RIGHT_ROUTING,
            )
            for name in ("scoring_func", "e_score_correction_bias")
        ),
    )
)
