# SPDX-License-Identifier: Apache-2.0
"""The part of the list that concerns layers with a recurrent state; `listing` has the whole. In
place in workers whose target has such layers."""

from __future__ import annotations

from vllm_specplug.seams.reasons import TREE, overrides, uses
from vllm_specplug.seams.seam import InstanceAttribute, Register, SeamSet, Wrap

_BACKENDS = "vllm.v1.attention.backends"
_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
_WHY_STATES = (
    "vLLM keeps a recurrent state per draft token, in the order of a chain; trees keep one per "
    "sequence and apply the accepted path"
)
_WHY_BLOCKS = (
    "with prefix caching vLLM copies states between blocks with Triton kernels, and by how many "
    "states of drafts were accepted"
)
_MODEL_STATE = "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState"
_HAS_STATES = f"vLLM takes parents of drafts in layers with a state ({TREE})"

# With kernels of any kind.
STATE_SEAMS = SeamSet(
    (
        Register(
            "state_rows",
            f"{_BACKENDS}.registry:MambaAttentionBackendEnum.GDN_ATTN",
            _WHY_STATES,
            _HAS_STATES,
            path="vllm_specplug.vllm_attention.state_rows.TreeGDNBackend",
        ),
        Wrap(
            "state_rows",
            f"{_GDN}._forward_core",
            _WHY_STATES,
            _HAS_STATES,
            make="vllm_specplug.vllm_attention.state_rows:with_device_trees",
        ),
        *uses(
            "state_blocks",
            _WHY_BLOCKS,
            _HAS_STATES,
            "vllm.v1.kv_cache_interface:MambaSpec",
        ),
        *overrides(
            "state_blocks",
            _WHY_BLOCKS,
            _HAS_STATES,
            _MODEL_STATE,
            "preprocess_state",
            "postprocess_state",
        ),
        InstanceAttribute(
            "state_blocks", f"{_MODEL_STATE}._mamba_state_idx_gpu", _WHY_BLOCKS, _HAS_STATES
        ),
        *uses(
            "state_rows",
            _WHY_STATES,
            _HAS_STATES,
            "vllm.forward_context:get_forward_context",
            "vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first",
            f"{_BACKENDS}.gdn_attn:GDNAttentionBackend",
            f"{_BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder",
            f"{_GDN}.get_state_shape",
            f"{_GDN}.get_state_dtype",
        ),
        *overrides(
            "state_rows",
            _WHY_STATES,
            _HAS_STATES,
            f"{_BACKENDS}.gdn_attn:GDNAttentionBackend",
            "get_builder_cls",
        ),
        *overrides(
            "state_rows",
            _WHY_STATES,
            _HAS_STATES,
            f"{_BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder",
            "__init__",
            "build",
            "get_cudagraph_support",
        ),
        *(
            InstanceAttribute("state_rows", f"{owner}.{name}", _WHY_STATES, _HAS_STATES)
            for owner, names in (
                (
                    f"{_BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder",
                    "speculative_config use_spec_decode num_spec",
                ),
                (
                    _GDN,
                    "num_spec num_k_heads num_v_heads tp_size activation conv1d dt_bias A_log "
                    "enable_fused_gdn_spec_decode",
                ),
            )
            for name in names.split()
        ),
    )
)

CPU_STATE_SEAMS = SeamSet(
    (
        Wrap(
            "state_rows",
            "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
            _WHY_STATES,
            _HAS_STATES,
            make="vllm_specplug.vllm_attention.state_rows:with_trees",
        ),
        Wrap(
            "state_layers",
            "vllm.platforms.cpu:CpuPlatform.update_block_size_for_backend",
            _WHY_STATES,
            _HAS_STATES,
            make="vllm_specplug.vllm_worker.target.state_layers:without_draft_states",
        ),
        *uses(
            "state_rows",
            _WHY_STATES,
            _HAS_STATES,
            "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_unpacked_conv_weight",
            f"{_GDN}.rearrange_mixed_qkv",
        ),
    )
)

# On CUDA.
DEVICE_STATE_SEAMS = SeamSet(
    (
        Wrap(
            "state_layers",
            "vllm.platforms.interface:Platform.update_block_size_for_backend",
            _WHY_STATES,
            _HAS_STATES,
            make="vllm_specplug.vllm_worker.target.state_layers:without_draft_states",
        ),
        *uses(
            "state_rows",
            _WHY_STATES,
            _HAS_STATES,
            f"{_BACKENDS}.utils:compute_causal_conv1d_metadata",
            f"{_BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder._build_chunk_metadata",
        ),
    )
)
