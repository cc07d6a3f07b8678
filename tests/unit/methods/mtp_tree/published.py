# SPDX-License-Identifier: Apache-2.0
"""Configs of targets that ship a module with MLA or in fp8, as public code repeats them."""

from __future__ import annotations

from typing import Any

from tests.e2e.fp8_modules import BLOCKS, CHANNELS

GLM_47_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "dtype": "bfloat16", "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47,
    "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0,
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": BLOCKS,
    "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
GLM_45_AIR_FP8: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "quantization_config": CHANNELS, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
QWEN36_35B_A3B_FP8: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "quantization_config": BLOCKS, "tie_word_embeddings": False, "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "dtype": "bfloat16", "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 2048, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "shared_expert_intermediate_size": 512, "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
        },
    },
}  # fmt: skip
_SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "kv_lora_rank": 12, "max_position_embeddings": 64,
    "moe_intermediate_size": 12, "n_routed_experts": 6, "num_attention_heads": 4,
    "num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_key_value_heads": 4,
    "q_lora_rank": 10, "shared_expert_intermediate_size": 20, "vocab_size": 40,
}  # fmt: skip


def small(raw: dict[str, Any]) -> dict[str, Any]:
    """A config in small, with heads of a sixteenth of the sizes."""
    if "text_config" in raw:
        return {**raw, "text_config": small(raw["text_config"])}
    heads = ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    made = {**raw, **{name: raw[name] // 16 for name in heads if name in raw}}
    made |= {name: size for name, size in _SMALL.items() if name in raw}
    if raw.get("n_group", 1) > 1:
        made |= {"n_group": 3, "topk_group": 2}
    if raw.get("rope_scaling"):
        # Contexts of the tests are longer.
        made["rope_scaling"] = {**raw["rope_scaling"], "original_max_position_embeddings": 16}
    return made
