# SPDX-License-Identifier: Apache-2.0
"""Seams of layers with a recurrent state.

Workers apply them if their target has such layers.
"""

from __future__ import annotations

from vllm_specplug.seams.reasons import BACKENDS, TREE, attributes, overrides, uses
from vllm_specplug.seams.seam import Register, SeamSet, Wrap

_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
_METADATA_BUILDER = f"{BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder"
_WHY_STATES = (
    "vLLM keeps one recurrent state per draft token, in the order of a chain; trees keep one per "
    "request and apply the accepted path"
)
_WHY_BLOCKS = (
    "with prefix caching vLLM copies states between blocks with Triton kernels, chosen by the "
    "number of accepted drafts"
)
_MODEL_STATE = "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState"
_HAS_PARENTS = f"vLLM passes the parents of drafts to layers with a state ({TREE})"


def _block_size(platform: str) -> Wrap:
    return Wrap(
        "state_layers",
        f"{platform}.update_block_size_for_backend",
        _WHY_STATES,
        _HAS_PARENTS,
        make="vllm_specplug.vllm_worker.target.state_layers:without_draft_states",
    )


# On every device.
STATE_SEAMS = SeamSet(
    (
        Register(
            "state_rows",
            f"{BACKENDS}.registry:MambaAttentionBackendEnum.GDN_ATTN",
            _WHY_STATES,
            _HAS_PARENTS,
            path="vllm_specplug.vllm_attention.state_rows.TreeGDNBackend",
        ),
        Wrap(
            "state_rows",
            f"{_GDN}._forward_core",
            _WHY_STATES,
            _HAS_PARENTS,
            make="vllm_specplug.vllm_attention.state_rows:wrap_device_core",
        ),
        *uses(
            "state_blocks",
            _WHY_BLOCKS,
            _HAS_PARENTS,
            "vllm.v1.kv_cache_interface:MambaSpec",
        ),
        *overrides(
            "state_blocks",
            _WHY_BLOCKS,
            _HAS_PARENTS,
            _MODEL_STATE,
            "preprocess_state",
            "postprocess_state",
        ),
        *attributes(
            "state_blocks", _WHY_BLOCKS, _HAS_PARENTS, _MODEL_STATE, "_mamba_state_idx_gpu"
        ),
        *uses(
            "state_rows",
            _WHY_STATES,
            _HAS_PARENTS,
            "vllm.forward_context:get_forward_context",
            "vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first",
            f"{BACKENDS}.gdn_attn:GDNAttentionBackend",
            _METADATA_BUILDER,
            f"{_GDN}.get_state_shape",
            f"{_GDN}.get_state_dtype",
        ),
        *overrides(
            "state_rows",
            _WHY_STATES,
            _HAS_PARENTS,
            f"{BACKENDS}.gdn_attn:GDNAttentionBackend",
            "get_builder_cls",
        ),
        *overrides(
            "state_rows",
            _WHY_STATES,
            _HAS_PARENTS,
            _METADATA_BUILDER,
            "__init__",
            "build",
            "get_cudagraph_support",
        ),
        *attributes(
            "state_rows",
            _WHY_STATES,
            _HAS_PARENTS,
            _METADATA_BUILDER,
            "speculative_config",
            "use_spec_decode",
            "num_spec",
        ),
        *attributes(
            "state_rows",
            _WHY_STATES,
            _HAS_PARENTS,
            _GDN,
            "num_spec",
            "num_k_heads",
            "num_v_heads",
            "tp_size",
            "activation",
            "conv1d",
            "dt_bias",
            "A_log",
            "enable_fused_gdn_spec_decode",
        ),
    )
)

CPU_STATE_SEAMS = SeamSet(
    (
        Wrap(
            "state_rows",
            "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
            _WHY_STATES,
            _HAS_PARENTS,
            make="vllm_specplug.vllm_attention.state_rows:wrap_cpu_core",
        ),
        _block_size("vllm.platforms.cpu:CpuPlatform"),
        *uses(
            "state_rows",
            _WHY_STATES,
            _HAS_PARENTS,
            "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_unpacked_conv_weight",
            f"{_GDN}.rearrange_mixed_qkv",
        ),
    )
)

# On CUDA.
DEVICE_STATE_SEAMS = SeamSet(
    (
        _block_size("vllm.platforms.interface:Platform"),
        *uses(
            "state_rows",
            _WHY_STATES,
            _HAS_PARENTS,
            f"{BACKENDS}.utils:compute_causal_conv1d_metadata",
            f"{_METADATA_BUILDER}._build_chunk_metadata",
        ),
    )
)
