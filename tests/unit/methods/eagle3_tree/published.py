# SPDX-License-Identifier: Apache-2.0
"""`config.json`s of EAGLE-3 heads as public repositories have them, and their tensors.

Of a public file all fields are here, under the repository and commit it was read from.
No weight file of these heads was read: names and shapes are those of the public modelling code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# SafeAILab/EAGLE (Apache-2.0), eagle/traineagle3/config.json,
# 9666a8182d9bed8b5b637fd4a126c90d9b9c3db2: the trainer of the yuhuili heads, which are
# pytorch_model.bin files.
EAGLE_LLAMA3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "eos_token_id": 128001,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 2048, "model_type": "llama",
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.28.1", "use_cache": True, "vocab_size": 128256,
    "draft_vocab_size": 32000,
}  # fmt: skip

# sgl-project/SpecForge (Apache-2.0), configs/qwen3-4b-eagle3.json,
# 7c83c0a20aad7eae06fef5e3b3a7663f29f52c24
SPECFORGE_QWEN3_4B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 80, "hidden_act": "silu",
    "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 9728,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936, "draft_vocab_size": 32000,
}  # fmt: skip

# sgl-project/SpecForge (Apache-2.0), configs/qwen3-30B-A3B-eagle3.1.json,
# 581664ac7ae4a034c5d0327f321d47cecb0051f0
SPECFORGE_QWEN3_30B_EAGLE31 = SPECFORGE_QWEN3_4B | {
    "fc_norm": True, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 12288,
    "max_position_embeddings": 2048, "max_window_layers": 48, "norm_output": True,
    "num_key_value_heads": 4, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "transformers_version": "4.53.2",
}  # fmt: skip

# In the form of RedHatAI/gemma-4-31B-it-speculator.eagle3, the fields a public reader's test quotes
# of it. Not the whole file.
SPECULATORS_GEMMA4_31B: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"], "draft_vocab_size": 32000, "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": [2, 30, 57], "embed_requires_grad": False,
    "norm_before_fc": False, "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{
            "accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3,
            "verifier_accept_k": 1,
        }],
        "verifier": {"architectures": [], "name_or_path": "google/gemma-4-31B-it"},
    },
    "speculators_model_type": "eagle3", "target_hidden_size": None, "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5376,
        "intermediate_size": 21504, "max_position_embeddings": 262144, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False, "vocab_size": 262144,
    },
}  # fmt: skip

# What vllm-project/speculators (Apache-2.0) writes by default since sliding windows came to its
# EAGLE-3 heads, with the values of a Qwen3-8B target: scripts/train.py, docs/cli/train.md and
# src/speculators/models/eagle3/config.py, c05b95b303f7d4f21e8d7624e0ffa1c2d9b4d73b. Not the file of
# a published head.
SPECULATORS_QWEN3_8B_WINDOW = SPECULATORS_GEMMA4_31B | {
    "eagle_aux_hidden_state_layer_ids": [2, 18, 33], "fc_norm": False, "norm_before_fc": True,
    "norm_output": True,
    "transformer_layer_config": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12288, "layer_types": ["sliding_attention"],
        "max_position_embeddings": 40960, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 1, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_window": 2048, "tie_word_embeddings": False, "use_sliding_window": True,
        "vocab_size": 151936,
    },
}  # fmt: skip

# The same with --num-layers 3 --full-attention-indices 1.
SPECULATORS_QWEN3_8B_LAYERS = SPECULATORS_QWEN3_8B_WINDOW | {
    "transformer_layer_config": SPECULATORS_QWEN3_8B_WINDOW["transformer_layer_config"] | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
    },
}  # fmt: skip

# sgl-project/SpecForge (Apache-2.0), configs/qwen3-8b-peagle.json,
# fd6b16fcdfb651aba500d1eb4c9bc5a946d7696d
SPECFORGE_PEAGLE_QWEN3_8B = SPECFORGE_QWEN3_4B | {
    "architectures": ["PEagleDraftModel"], "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 4, "tie_word_embeddings": False,
}  # fmt: skip

# What vllm-project/speculators (Apache-2.0) writes for P-EAGLE by default, with the values of a
# Qwen3-8B target: src/speculators/models/peagle/config.py and core.py and docs/cli/train.md,
# c05b95b303f7d4f21e8d7624e0ffa1c2d9b4d73b. The proposed tokens are the depths of its training.
SPECULATORS_PEAGLE_QWEN3_8B = SPECULATORS_QWEN3_8B_WINDOW | {
    "architectures": ["PEagleDraftModel"], "embed_requires_grad": True, "mask_token_id": 151669,
    "norm_before_fc": False, "norm_output": False, "speculators_model_type": "peagle",
    "speculators_config": {
        "algorithm": "peagle", "default_proposal_method": "greedy",
        "proposal_methods": [{
            "accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 8,
            "verifier_accept_k": 1,
        }],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "transformer_layer_config": SPECULATORS_QWEN3_8B_WINDOW["transformer_layer_config"] | {
        "model_type": "qwen3",
    },
}  # fmt: skip

# The template that NVIDIA/Model-Optimizer (Apache-2.0) fills when it exports a head
# (modelopt/torch/export/plugins/hf_spec_configs.py, a2fbac7bad8ab446d3f8783dadb0c3366eb0ad73), with
# the values of a Llama-3.1-8B target. Not the file of a published head. Its tensors are
# `layers.0.*` (hf_spec_export.py), and `midlayer.*` where Megatron trained it (mcore_llama.py).
MODELOPT_LLAMA31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
    "vocab_size": 128256, "draft_vocab_size": 32000,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "mlp_bias": False,
    "rope_theta": 500000.0,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 15, 28], "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
        "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    },
}  # fmt: skip

# Tencent/AngelSlim, angelslim/compressor/speculative/train/configs/qwen3-8b-eagle3.json,
# 67394ce55f6b6cfae702575fbc3c7a05c13fdd74
ANGELSLIM_QWEN3_8B = SPECFORGE_QWEN3_4B | {
    "architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3", "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False,
}  # fmt: skip

# deepseek-ai/DeepSpec (MIT), afdfa7c9382a3341a3e6f17756dd816da79f132c:
# deepspec/modeling/eagle3/qwen3/config.py puts the fields from `architectures` to
# `draft_num_hidden_layers` over the target's config (here Qwen3-4B's), with the values of
# config/eagle3/eagle3_qwen3_4b.py. The whole vocabulary, both tables, and norms of queries and keys
# (modeling.py); layer i is hidden_states[i + 1] (modeling/eagle3/common.py).
DEEPSPEC_QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3Eagle3Model"], "num_target_layers": 36, "num_hidden_layers": 1,
    "layer_types": ["full_attention"], "target_model_name_or_path": "Qwen/Qwen3-4B",
    "target_layer_ids": [1, 9, 17, 25, 33], "ttt_length": 7, "step_loss_decay": 0.8,
    "draft_num_hidden_layers": 1, "tie_word_embeddings": False, "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 9728,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

# sgl-project/SpecForge (Apache-2.0), configs/qwen2-5-vl-7b-eagle3.json,
# a6b6b0230009d15ec2a97a57384e6f53f0f96946
SPECFORGE_QWEN25_VL_7B = SPECFORGE_QWEN3_4B | {
    "head_dim": 128, "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 8192, "max_window_layers": 28, "target_model_type": "qwen2_5_vl",
    "num_attention_heads": 28, "num_key_value_heads": 4, "pretraining_tp": 1,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32768,
    "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip

# lightseekorg/TorchSpec (MIT), configs/draft_models/glm4_moe_eagle3.json,
# 3bd756e7565728d59d3878c1d2a01be1b73297b1. Its MLP has experts; no published head was found.
TORCHSPEC_GLM4_MOE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLMEagle3"], "model_type": "glm4_moe", "use_moe": True,
    "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 1,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "partial_rotary_factor": 0.5, "hidden_act": "silu", "rms_norm_eps": 1e-05,
    "vocab_size": 151552, "draft_vocab_size": 151552, "torch_dtype": "bfloat16",
    "rope_theta": 10000.0, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid",
    "first_k_dense_replace": 0, "train_router": True,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 21, 42], "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    },
    "pad_token_id": 0,
}  # fmt: skip

SMALL = {"hidden_size": 16, "vocab_size": 40, "num_hidden_layers": 8}


def small(raw: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The config with a layer that fits `SMALL`, everything else as it is; `changes` last."""
    shape = {
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40,
    }  # fmt: skip
    made = {**raw, "rms_norm_eps": 1e-5}
    if "PEagleDraftModel" in raw["architectures"]:
        # SpecForge does not write it; its user must add it.
        made["mask_token_id"] = 39
    if "draft_vocab_size" in raw:
        made["draft_vocab_size"] = 12
    if "target_layer_ids" in raw:
        made["target_layer_ids"] = [1, 3, 4]
    if "transformer_layer_config" in raw:
        made["transformer_layer_config"] = {**raw["transformer_layer_config"], **shape}
        if raw["transformer_layer_config"].get("sliding_window"):
            made["transformer_layer_config"]["sliding_window"] = 6
        made["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    else:
        made.update(shape)
        if "eagle_config" in raw:
            ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
            made["eagle_config"] = {**raw["eagle_config"], **ids}
    return {**made, **changes}


def shapes_of(raw: Mapping[str, Any], *, prefix: str = "midlayer.") -> dict[str, tuple[int, ...]]:
    """Shapes of the floating-point tensors of a head with config `raw`, by its trainer's names."""
    c = {**raw, **raw.get("transformer_layer_config", {})}
    h = c["hidden_size"]
    dim = c.get("head_dim") or h // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    joined = 3 * (raw.get("target_hidden_size") or h)
    draft_vocab = c.get("draft_vocab_size") or c["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, joined),
        f"{prefix}input_layernorm.weight": (h,),
        f"{prefix}hidden_norm.weight": (h,),
        f"{prefix}self_attn.q_proj.weight": (q, 2 * h),
        f"{prefix}self_attn.k_proj.weight": (kv, 2 * h),
        f"{prefix}self_attn.v_proj.weight": (kv, 2 * h),
        f"{prefix}self_attn.o_proj.weight": (h, q),
        f"{prefix}post_attention_layernorm.weight": (h,),
        f"{prefix}mlp.gate_proj.weight": (c["intermediate_size"], h),
        f"{prefix}mlp.up_proj.weight": (c["intermediate_size"], h),
        f"{prefix}mlp.down_proj.weight": (h, c["intermediate_size"]),
        "norm.weight": (h,),
        "lm_head.weight": (draft_vocab, h),
    }
    for i in range(1, c["num_hidden_layers"]):
        first = {k.removeprefix(prefix): v for k, v in shapes.items() if k.startswith(prefix)}
        shapes |= {
            f"layers.{i}.{name}": (shape[0], h) if name.endswith(("q_proj.weight",
            "k_proj.weight", "v_proj.weight")) else shape
            for name, shape in first.items() if name != "hidden_norm.weight"
        }  # fmt: skip
    if "mask_token_id" in raw:
        shapes |= {"mask_hidden": (1, 1, joined), "embed_tokens.weight": (c["vocab_size"], h)}
    if c.get("model_type") == "qwen3":
        layers = {name.partition(".self_attn.")[0] for name in shapes if ".self_attn." in name}
        shapes |= {f"{i}.self_attn.{n}_norm.weight": (dim,) for i in layers for n in "qk"}
    if "target_layer_ids" in raw:  # DeepSpec
        shapes["embed_tokens.weight"] = (c["vocab_size"], h)
    if raw.get("fc_norm"):
        shapes.update({f"fc_norm.{i}.weight": (joined // 3,) for i in range(3)})
    if raw.get("norm_before_fc"):
        shapes["input_norm.weight"] = (joined,)
    return shapes


def tensors_of(raw: Mapping[str, Any], *, prefix: str = "midlayer.") -> dict[str, torch.Tensor]:
    """Random tensors of a head with config `raw`, by the names of its trainer."""
    shapes = shapes_of(raw, prefix=prefix)
    torch.manual_seed(5)
    made = {name: torch.randn(shape) * 0.4 for name, shape in shapes.items()}
    for name in made:
        if "norm" in name:
            made[name] = 1 + 0.3 * made[name]
    c = {**raw, **raw.get("transformer_layer_config", {})}
    draft_vocab = c.get("draft_vocab_size") or c["vocab_size"]
    if draft_vocab == c["vocab_size"]:
        return made
    ids = torch.randperm(c["vocab_size"])[:draft_vocab].sort().values
    made["d2t"] = ids - torch.arange(len(ids))
    made["t2d"] = torch.zeros(c["vocab_size"], dtype=torch.bool)
    made["t2d"][ids] = True
    return made
