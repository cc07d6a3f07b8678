# SPDX-License-Identifier: Apache-2.0
"""Published heads for targets with Gated DeltaNet layers are read as their trainers meant them.

The configs are those of sgl-project/SpecForge (Apache-2.0), under file and commit, with all fields.
"""

from __future__ import annotations

from typing import Any

from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.dspark_tree.config import DSparkConfig
from vllm_specplug.methods.eagle3_tree.config import Eagle3Config

# configs/qwen3.5-27b-dflash.json, 95d22a7cc548d9da4333702e95e5754a11618f77
DFLASH_QWEN35_27B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16,
    "dflash_config": {"mask_token_id": None, "target_layer_ids": [3, 15, 31, 47, 59]},
    "dtype": "bfloat16", "eos_token_id": 248044, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408,
    "layer_types": ["full_attention"] * 5, "max_position_embeddings": 262144, "model_type": "qwen3",
    "num_attention_heads": 24, "num_hidden_layers": 5, "num_key_value_heads": 4,
    "num_target_layers": 64, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
}  # fmt: skip

# configs/qwen3.5-4b-vl-dflash.json, 18273721331861005eb2bdc8cee75831996accb5
DFLASH_QWEN35_4B_VL = DFLASH_QWEN35_27B | {
    "bos_token_id": 248043,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
    "hidden_size": 2560, "intermediate_size": 9216, "model_type": "qwen3_vl_text",
    "num_attention_heads": 16, "num_target_layers": 32, "pad_token_id": 248044,
    "partial_rotary_factor": 0.25,
    "rope_scaling": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
        "partial_rotary_factor": 0.25,
    },
    "sliding_window": None, "tie_word_embeddings": True,
}  # fmt: skip

# configs/qwen3.5-4b-dspark.json, 0d668ed240d1fbf4e0569727a40787d2e4ac8e73
DSPARK_QWEN35_4B = DFLASH_QWEN35_27B | {
    "architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "bos_token_id": 248043,
    "dflash_config": {
        "mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29], "projector_type": "dspark",
        "markov_rank": 256, "markov_head_type": "vanilla", "confidence_head_alpha": 1.0,
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    },
    "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728, "max_window_layers": 5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_target_layers": 32,
    "pad_token_id": 248044, "sliding_window": None, "tie_word_embeddings": True,
    "use_sliding_window": False,
}  # fmt: skip

# configs/qwen3.8-27b-dspark.json, 43afe8c57b01a0f8170ddc90602477e6f2690b5e
DSPARK_QWEN38_27B: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "dflash_config": {
        "attention_mode": "gqa", "confidence_head_alpha": 1.0, "confidence_head_with_markov": True,
        "enable_confidence_head": True, "markov_head_type": "vanilla", "markov_rank": 256,
        "mask_token_id": 248070, "projector_type": "dspark",
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "block_size": 7, "dtype": "bfloat16", "target_hidden_size": None, "bos_token_id": None,
    "eos_token_id": 248044, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 17408, "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 262144, "max_window_layers": 5, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8,
    "pad_token_id": 248044, "rms_norm_eps": 1e-06, "rope_theta": 10000000,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 8192, "rope_theta": 10000000, "rope_type": "yarn",
    },
    "num_target_layers": 64, "sliding_window": None, "tie_word_embeddings": False,
    "use_cache": True, "use_sliding_window": False, "vocab_size": 248320,
}  # fmt: skip

# configs/qwen3.5-4b-eagle3.json, 4b61b559c44fa01b258c1e96540d23d1d064de38
EAGLE3_QWEN35_4B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 248044, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2560,
    "initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 32768,
    "model_type": "llama", "num_attention_heads": 16, "num_hidden_layers": 1,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.57.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 248320, "draft_vocab_size": 32000,
}  # fmt: skip


def test_dflash() -> None:
    config = BlockHeadConfig.from_dict(DFLASH_QWEN35_27B, num_target_layers=64)
    assert config.target_layer_ids == (3, 15, 31, 47, 59)
    assert (config.block_size, config.causal, config.mask_token_id) == (16, False, None)
    assert (config.head_dim, config.rope_theta, config.partial_rotary_factor) == (256, 1e7, 1.0)


def test_dspark() -> None:
    config = DSparkConfig.from_dict(DSPARK_QWEN35_4B, num_target_layers=32)
    assert config.target_layer_ids == (1, 8, 15, 22, 29)
    assert (config.markov_rank, config.confidence_size) == (256, 2560 + 256)
    assert config.sample_from_anchor and config.mask_token_id == 248070
    long = DSparkConfig.from_dict(DSPARK_QWEN38_27B, num_target_layers=64)
    assert (long.block_size, long.rope_theta) == (7, 1e7)
    assert long.rope_scaling is not None
    assert (long.rope_scaling["rope_type"], long.rope_scaling["factor"]) == ("yarn", 32)


def test_eagle3() -> None:
    config = Eagle3Config.from_dict(EAGLE3_QWEN35_4B, num_target_layers=32)
    assert config.target_layer_ids == (1, 15, 28)
    assert (config.head_dim, config.draft_vocab_size, config.rope_theta) == (256, 32000, 1e7)


def test_a_head_with_positions_on_three_axes_is_read_as_text_has_them() -> None:
    config = BlockHeadConfig.from_dict(DFLASH_QWEN35_4B_VL, num_target_layers=32)
    assert (config.rope_scaling, config.partial_rotary_factor, config.rope_theta) == (
        None, 0.25, 1e7,
    )  # fmt: skip
    assert config.rotary.rotated == 64
