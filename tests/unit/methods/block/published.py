# SPDX-License-Identifier: Apache-2.0
"""config.json files as the trainers of block heads write them; facts of their sources."""

from __future__ import annotations

import copy
from typing import Any

# sgl-project/SpecForge b3d2401 configs/qwen3-8b-dflash.json, whose fields are those of z-lab's
# Qwen3-8B head; `dflash_config` is that of its sibling configs/qwen3-8b-domino.json at 70e241a.
ZLAB_QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "modeling_dflash.DFlashDraftModel"}, "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5, "max_position_embeddings": 40960, "max_window_layers": 5,
    "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 5,
    "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with other values; a mapping is merged into the one it replaces."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        old = config.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        config[name] = {**old, **value} if both else value
    return config


# deepseek-ai/DeepSpec afdfa7c: deepspec/modeling/dspark/qwen3/config.py puts these over the
# target's config (Qwen3-4B), with the values of config/dflash/dflash_qwen3_4b.py. Its labels are
# the tokens 1..block_size after the anchor (modeling.py), so slot k predicts token k + 1.
DEEPSPEC_DFLASH_QWEN3_4B = changed(
    ZLAB_QWEN3_8B,
    architectures=["Qwen3DSparkModel"], hidden_size=2560, intermediate_size=9728, block_size=7,
    mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33], num_anchors=512,
    enable_confidence_head=False, markov_rank=0, dflash_config=None, auto_map=None,
)  # fmt: skip
# The same with the values of config/dspark/dspark_qwen3_4b.py: deepseek-ai's dspark_*_block7.
DEEPSPEC_DSPARK_QWEN3_4B = changed(
    DEEPSPEC_DFLASH_QWEN3_4B,
    enable_confidence_head=True, confidence_head_with_markov=True, markov_rank=256,
    markov_head_type="vanilla",
)  # fmt: skip
# Other values of `markov_head_type` in deepspec/modeling/dspark/markov_head.py.
DEEPSPEC_DSPARK_GATED = changed(DEEPSPEC_DSPARK_QWEN3_4B, markov_head_type="gated")
DEEPSPEC_DSPARK_RNN = changed(DEEPSPEC_DSPARK_QWEN3_4B, markov_head_type="rnn")
# sgl-project/SpecForge 832263f configs/qwen3-4b-dspark.json
SPECFORGE_DSPARK_QWEN3_4B = changed(
    ZLAB_QWEN3_8B, hidden_size=2560, intermediate_size=9728, block_size=7,
    dflash_config={
        "projector_type": "dspark", "markov_rank": 256, "markov_head_type": "vanilla",
        "confidence_head_alpha": 1.0, "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
)  # fmt: skip
# sgl-project/SpecForge 4e3f455 configs/qwen3-8b-dspark.json
SPECFORGE_DSPARK_QWEN3_8B = changed(
    ZLAB_QWEN3_8B,
    architectures=["DSparkDraftModel"], auto_map={"AutoModel": "dspark.DSparkDraftModel"},
    dflash_config={
        "projector_type": "dspark", "markov_rank": 256, "markov_head_type": "vanilla",
        "confidence_head_alpha": 1.0, "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
)  # fmt: skip
# sgl-project/SpecForge 925f116 configs/qwen3-8b-dspark-causal-noconf-b16.json
SPECFORGE_DSPARK_CAUSAL = changed(
    SPECFORGE_DSPARK_QWEN3_8B, is_causal=True,
    dflash_config={
        "attention_mode": "gqa", "confidence_head_alpha": 0.0, "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    },
)  # fmt: skip
# sgl-project/SpecForge 74716df configs/qwen3.6-27b-dspark.json: the Markov head's part has a
# container of its own.
SPECFORGE_DSPARK_QWEN36_27B = changed(
    ZLAB_QWEN3_8B,
    architectures=["DSparkDraftModel"], auto_map={"AutoModel": "dspark.DSparkDraftModel"},
    dflash_config={
        "attention_mode": "gqa", "mask_token_id": 248070, "projector_type": "dspark",
        "target_layer_ids": [2, 17, 32, 47, 62],
    },
    dspark_config={
        "confidence_head_with_markov": True, "enable_confidence_head": True,
        "markov_head_type": "vanilla", "markov_rank": 256,
    },
    target_hidden_size=None, bos_token_id=None, eos_token_id=248044, hidden_size=5120,
    intermediate_size=17408, max_position_embeddings=262144, max_window_layers=28,
    num_target_layers=64, pad_token_id=248044, rope_theta=10000000, vocab_size=248320,
)  # fmt: skip
# sgl-project/SpecForge 134669b configs/qwen3-8b-dspark-draftvocab32k.json
SPECFORGE_DSPARK_DRAFT_VOCAB = changed(
    SPECFORGE_DSPARK_QWEN3_8B,
    block_size=7, draft_vocab_size=32000, dflash_config={"attention_mode": "gqa"},
)  # fmt: skip
# sgl-project/SpecForge 70e241a configs/qwen3-8b-domino.json
SPECFORGE_DOMINO_QWEN3_8B = changed(
    ZLAB_QWEN3_8B, emb_dim=256,
    dflash_config={
        "projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 256,
        "gru_hidden_dim": 1024, "shift_label": True,
    },
)  # fmt: skip
# sgl-project/SpecForge cf5525fb configs/qwen3.6-27b-domino-full-attention.json
SPECFORGE_DOMINO_QWEN36_27B = changed(
    ZLAB_QWEN3_8B,
    architectures=["DominoDraftModel"], auto_map={"AutoModel": "domino.DominoDraftModel"},
    dflash_config={
        "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61],
        "projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 256,
        "gru_hidden_dim": 1024, "shift_label": False,
    },
    hidden_size=5120, intermediate_size=17408, num_target_layers=64, rope_theta=10000000,
    vocab_size=248320,
)  # fmt: skip
# sgl-project/SpecForge 211b87f configs/qwen3-8b-dspine.json
SPECFORGE_DSPINE_QWEN3_8B = changed(
    ZLAB_QWEN3_8B, architectures=["DSpineDraftModel"], is_causal=True,
    dspine_config={"transfer_rank": 1024, "message_size": 512, "top_k": 16},
)  # fmt: skip
# sgl-project/SpecForge 47344ea configs/kimi-k2.7-code-dflash.json
SPECFORGE_DFLASH_KIMI = changed(
    ZLAB_QWEN3_8B, auto_map={"AutoModel": "dflash.DFlashDraftModel"}, block_size=8,
    dflash_config={"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    hidden_size=7168, intermediate_size=18432, layer_types=["full_attention"] * 6,
    mask_token_id=163838, max_position_embeddings=262144, max_window_layers=6,
    num_attention_heads=64, num_hidden_layers=6, num_target_layers=61, rms_norm_eps=1e-05,
    rope_scaling={
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn",
    },
    rope_theta=50000.0, vocab_size=163840,
)  # fmt: skip
# Layers as vLLM 0.32 describes z-lab's gemma-4-31B head (model_executor/models/qwen3_dflash.py):
# sliding ones, causal in the block, before one that sees all; the window is that of SpecForge's
# configs/qwen3.6-27b-dflash2.json at 5943b2f.
ZLAB_MIXED = changed(
    ZLAB_QWEN3_8B,
    layer_types=["sliding_attention"] * 4 + ["full_attention"], sliding_window=2048,
    use_sliding_window=True,
)  # fmt: skip
# z-lab/Qwen3.8-27B-DFlash2 (incoai's copy is the same), whose config.json public loaders' tests
# repeat field for field; sgl-project/SpecForge 5943b2f configs/qwen3.6-27b-dflash2.json has the
# same fields.
ZLAB_DFLASH2_QWEN38_27B: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": None,
    "dflash_config": {
        "block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 248070,
        "selector_rank": 256, "selector_top_k": 16, "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "dtype": "bfloat16", "eos_token_id": 248044, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408, "is_causal": False,
    "layer_types": ["sliding_attention"] * 5, "max_position_embeddings": 262144,
    "max_window_layers": 5, "model_type": "qwen3", "num_attention_heads": 32,
    "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 64,
    "pad_token_id": 248044, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}, "sliding_window": 2048,
    "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": True,
    "vocab_size": 248320,
}  # fmt: skip
# incoai/GLM-5.3-Flash-DFlash2, from the same kind of source.
INCO_DFLASH2_GLM53_FLASH = changed(
    ZLAB_DFLASH2_QWEN38_27B,
    dflash_config={"mask_token_id": 154856, "target_layer_ids": [5, 14, 24, 33, 42]},
    eos_token_id=[154820, 154827, 154829], hidden_size=4096, intermediate_size=12288,
    max_position_embeddings=1048576, num_target_layers=45, pad_token_id=154820, rms_norm_eps=1e-05,
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, use_cache=False,
    vocab_size=154880,
)  # fmt: skip
# Muse-Glimmer-30B-DFlash2, as a public comparison of the two heads lists its other values; the
# remaining fields are those of Qwen3.8's head.
MUSE_DFLASH2_GLIMMER_30B = changed(
    ZLAB_DFLASH2_QWEN38_27B,
    dflash_config={
        "block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49],
        "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0,
    },
    hidden_size=6656, intermediate_size=19968, num_target_layers=52, vocab_size=202048,
)  # fmt: skip
# lightseekorg/kimi-k3-dflash2, from public loaders' tests: layers with latent attention.
LIGHTSEEK_DFLASH2_KIMI_K3: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 14336, "num_hidden_layers": 5,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
    "rms_norm_eps": 1e-05, "num_target_layers": 93,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "is_causal": False,
    "use_sliding_window": True, "sliding_window": 4096,
    "dflash_config": {
        "block_size": 8, "attention_mode": "mla", "conv_kernel_size": 2, "conv_group_size": 16,
        "selector_rank": 256, "selector_top_k": 16, "target_layer_ids": [19, 37, 66, 78, 90],
        "mask_token_id": 163592,
    },
    "draft_vocab_size": 163840,
}  # fmt: skip
# Written by NVIDIA/Model-Optimizer 0371364 modelopt/torch/export/plugins/hf_spec_export.py, with
# the sizes of modelopt_recipes/general/speculative_decoding/lilicorr.yaml at d3f4928.
MODELOPT_LILICORR_QWEN3_8B = changed(
    ZLAB_QWEN3_8B, architectures=["LiLiCorrDraftModel"], auto_map=None,
    dflash_config={
        "causal": False, "projector_type": "lilicorr", "lilicorr_enabled": True,
        "lilicorr_candidate_topk": 8, "lilicorr_hidden_size": 1024, "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 8, "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 1024,
        "lilicorr_vector_eps": 0.0001, "lilicorr_logit_scale": 8.0,
    },
)  # fmt: skip
# Fields that vLLM 0.33 reads (model_executor/models/qwen3_xpress.py), with its defaults; no
# published config was found.
VLLM_XPRESS_QWEN3_8B = changed(
    ZLAB_QWEN3_8B, architectures=["Qwen3XPressModel"], auto_map=None, xpress_rank=256,
    xpress_mlp_hidden=512, xpress_topc=512, xpress_num_passes=6,
)  # fmt: skip
# Written by NVIDIA/Model-Optimizer a2fbac7 modelopt/torch/export/plugins/hf_spec_export.py
# (DSparkExporter) with the sizes of modelopt_recipes/general/speculative_decoding/dspark.yaml.
MODELOPT_DSPARK_QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16,
    "dflash_config": {
        "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "projector_type": "dspark",
        "shift_label": True, "markov_rank": 256, "markov_head_type": "vanilla",
        "use_confidence_head": True,
    },
    "hidden_size": 4096, "num_hidden_layers": 5, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "hidden_act": "silu",
    "rms_norm_eps": 1e-06, "vocab_size": 151936, "max_position_embeddings": 40960,
    "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0,
    "rope_theta": 1000000, "rope_scaling": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "num_target_layers": 36, "layer_types": ["full_attention"] * 5,
}  # fmt: skip
MODELOPT_DSPARK_GATED, MODELOPT_DSPARK_RNN = (
    changed(MODELOPT_DSPARK_QWEN3_8B, dflash_config={"markov_head_type": kind})
    for kind in ("gated", "rnn")
)
# Its module (modelopt/torch/speculative/plugins/modeling_dspark.py) has the two heads' tensors
# beside the block's own. By the names that all others write.
MODELOPT_NAMES = {
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "confidence_proj.weight",
    "confidence_head.proj.bias": "confidence_proj.bias",
    "markov_head.gate_proj.weight": "gate_proj.weight",
    "markov_head.gate_proj.bias": "gate_proj.bias",
    "markov_head.joint_proj.weight": "joint_proj.weight",
    "markov_head.joint_proj.bias": "joint_proj.bias",
}
# Tencent/AngelSlim 67394ce configs/qwen3_dflash.json; its module
# (angelslim/compressor/speculative/train/models/draft/qwen_dflash.py) has z-lab's tensors.
ANGELSLIM_DFLASH_QWEN3_4B = changed(
    ZLAB_QWEN3_8B,
    architectures=["QwenDFlashDraftModel"], auto_map=None, hidden_size=2560, intermediate_size=9728,
    num_anchors=512, loss_decay_gamma=7.0, attention_backend="flex_attention",
    tie_word_embeddings=True, torch_dtype="bfloat16",
)  # fmt: skip
# Tencent/AngelSlim 67394ce configs/qwen3_dflare.json
ANGELSLIM_DFLARE_QWEN3_4B = changed(
    ANGELSLIM_DFLASH_QWEN3_4B, architectures=["QwenDFlareDraftModel"],
    dflash_config={"target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29, 33]},
    layer_types=["full_attention"] * 7, max_window_layers=7, num_hidden_layers=7,
)  # fmt: skip
# sgl-project/SpecForge e5cec93 configs/qwen3.5-4b-domino.json: an architecture of its own.
SPECFORGE_DOMINO_QWEN35_4B = changed(
    ZLAB_QWEN3_8B,
    architectures=["DominoDraftModel"], auto_map={"AutoModel": "domino.DominoDraftModel"},
    dflash_config={
        "mask_token_id": 248070, "target_layer_ids": [3, 11, 19, 27, 31],
        "projector_type": "domino",
    },
    domino_config={
        "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": True,
    },
    hidden_size=2560, intermediate_size=9216, num_target_layers=32, rope_theta=10000000,
    vocab_size=248320,
)  # fmt: skip
# vllm-project/speculators c05b95b: fields and defaults of src/speculators/models/dflash/config.py,
# the layer config of scripts/train.py. attention.py masks full attention bidirectionally whatever
# `sliding_window_non_causal` says.
SPECULATORS_QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"], "aux_hidden_state_layer_ids": [2, 18, 33],
    "block_size": 8, "draft_vocab_size": 32000, "mask_token_id": 151669,
    "sample_from_anchor": False, "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {
            "architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B",
        },
    },
    "speculators_model_type": "dflash", "target_hidden_size": None, "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12288, "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": 32,
        "num_hidden_layers": 5, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
# vllm-project/speculators 3b731f0 src/speculators/models/jetspec: its blocks read the true tokens,
# and every slot, the anchor's too, predicts the next one.
SPECULATORS_JETSPEC = changed(
    SPECULATORS_QWEN3_8B,
    architectures=["JetSpecSpeculator"], speculators_model_type="jetspec", block_size=16,
    kd_temperature=1.0, mask_token_id=None,
)  # fmt: skip
# vllm-project/speculators 961aeaa src/speculators/models/dflash2/config.py, with its defaults. A
# DFlash2 head drafts the whole vocabulary; mgoin/Qwen3-4B-speculator.dflash2 has these fields.
SPECULATORS_DFLASH2 = changed(
    SPECULATORS_QWEN3_8B, architectures=["DFlash2DraftModel"], speculators_model_type="dflash2",
    sliding_window_non_causal=True, conv_kernel_size=2, conv_group_size=16, selector_rank=256,
    selector_top_k=16, draft_vocab_size=151936,
)  # fmt: skip
# vllm-project/speculators c05b95b src/speculators/models/dspark: sample_from_anchor by default, and
# the values of its training arguments for the two heads.
SPECULATORS_DSPARK = changed(
    SPECULATORS_QWEN3_8B,
    architectures=["DSparkSpeculator"], speculators_model_type="dspark", sample_from_anchor=True,
    markov_rank=256, markov_head_type="vanilla", enable_confidence_head=True,
    confidence_head_with_markov=True,
)  # fmt: skip
SPECULATORS_DSPARK_GATED = changed(SPECULATORS_DSPARK, markov_head_type="gated")
SPECULATORS_DSPARK_RNN = changed(SPECULATORS_DSPARK, markov_head_type="rnn")

# Sizes of a target and a head that tests can compute, for any of the configs above.
TINY_TARGET = {"hidden_size": 16, "vocab_size": 30, "num_hidden_layers": 4}
_TINY_LAYER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 30,
}


def tiny(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A published config with everything but its sizes, ids and numbers of layers."""
    if "transformer_layer_config" in config:
        layers = config["transformer_layer_config"]
        layers = changed(layers, **_TINY_LAYER, num_hidden_layers=2)
        layers["layer_types"] = layers["layer_types"][-2:]
        draft_vocab = 30 if config.get("selector_rank") else 20
        small = changed(config, draft_vocab_size=draft_vocab, aux_hidden_state_layer_ids=[2, 4])
        small = {**small, "transformer_layer_config": layers, "mask_token_id": 29}
    else:
        small = changed(config, **_TINY_LAYER, num_hidden_layers=2, num_target_layers=4)
        small["layer_types"] = small["layer_types"][-2:]
        if small.get("draft_vocab_size"):
            small["draft_vocab_size"] = 20
        ids = {"mask_token_id": 29, "target_layer_ids": [1, 3]}
        inner = small.get("dflash_config")
        small = changed(small, **(ids if inner is None else {"dflash_config": ids}))
    containers = ("dflash_config", "dspark_config", "domino_config")
    for part in (small, *(small.get(name) or {} for name in containers)):
        for key, size in (("markov_rank", 6), ("emb_dim", 6), ("gru_hidden_dim", 10)):
            if part.get(key):
                part[key] = size
        if part.get("selector_rank"):
            part.update({"conv_group_size": 4, "selector_rank": 6, "selector_top_k": 7})
        if part.get("block_size"):
            part["block_size"] = 5
    return changed(small, block_size=5, **changes)
