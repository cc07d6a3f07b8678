# SPDX-License-Identifier: Apache-2.0
"""Random multi-token-prediction modules in the layouts of Qwen's, GLM's and DeepSeek's
repositories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB = 24
PROMPTS = [[3 + (5 * i * i + k) % 20 for i in range(8 + 9 * k)] for k in range(4)]
# Model types whose module is the layer after the target's last one.
LAYERS = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
# Of Qwen3.5's checkpoints; speculators writes the same tensors by the other names.
NAMES = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}


def mlp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the module's MLP: dense, with joined experts (Qwen3.5), or with tensors for each
    expert (Qwen3-Next)."""
    hidden, kind = config["hidden_size"], config["model_type"]

    def dense(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.gate_proj.weight": (width, hidden),
            f"{prefix}.up_proj.weight": (width, hidden),
            f"{prefix}.down_proj.weight": (hidden, width),
        }

    if kind in ("qwen3_5", "qwen3_5_text"):
        return dense("mlp", config["intermediate_size"])
    width = config["moe_intermediate_size"]
    if kind in LAYERS:
        experts = config["n_routed_experts"]
        shapes = dense("mlp.shared_experts", width * config["n_shared_experts"])
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    else:
        experts = config["num_experts"]
        shapes = dense("mlp.shared_expert", config["shared_expert_intermediate_size"])
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    shapes["mlp.gate.weight"] = (experts, hidden)
    if kind in ("qwen3_next", *LAYERS):
        for expert in range(experts):
            shapes |= dense(f"mlp.experts.{expert}", width)
    else:
        shapes["mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
        shapes["mlp.experts.down_proj"] = (experts, hidden, width)
    return shapes


def module_tensors(config: dict[str, Any], seed: int = 6) -> dict[str, torch.Tensor]:
    """Random tensors of the module of a text model, by their public names."""
    torch.manual_seed(seed)
    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden), "norm.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (hidden,), "pre_fc_norm_embedding.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (2 * q, hidden),
        "layers.0.self_attn.k_proj.weight": (kv, hidden),
        "layers.0.self_attn.v_proj.weight": (kv, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, q),
        "layers.0.self_attn.q_norm.weight": (dim,), "layers.0.self_attn.k_norm.weight": (dim,),
        **{f"layers.0.{name}": shape for name, shape in mlp_shapes(config).items()},
    }  # fmt: skip
    return {
        f"mtp.{name}": torch.randn(shape) * (0.2 if "norm" in name else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the attention of a GLM-4 with experts or a DeepSeek-V3, with MLA or without."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
        content, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        value = config["v_head_dim"]
        return {
            "q_a_proj.weight": (rank, hidden), "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (heads * (content + turned), rank),
            "kv_a_proj_with_mqa.weight": (latent + turned, hidden),
            "kv_a_layernorm.weight": (latent,),
            "kv_b_proj.weight": (heads * (content + value), latent),
            "o_proj.weight": (hidden, heads * value),
        }  # fmt: skip
    dim = config["head_dim"]
    q, kv = heads * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (q, hidden), "o_proj.weight": (hidden, q),
        "k_proj.weight": (kv, hidden), "v_proj.weight": (kv, hidden),
    }  # fmt: skip
    if config.get("attention_bias"):
        shapes |= {f"{n}_proj.bias": (s,) for n, s in (("q", q), ("k", kv), ("v", kv))}
    if config.get("use_qk_norm"):
        shapes |= {f"{n}_norm.weight": (dim,) for n in "qk"}
    return shapes


def layer_tensors(config: dict[str, Any], seed: int = 6) -> dict[str, torch.Tensor]:
    """Random tensors of a module that is stored as a layer, by their public names."""
    torch.manual_seed(seed)
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{n}.weight": (hidden,) for n in ("enorm", "hnorm", "shared_head.norm")},
        **{f"{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")},
        "eh_proj.weight": (hidden, 2 * hidden),
        **{f"self_attn.{name}": shape for name, shape in attention_shapes(config).items()},
        **mlp_shapes(config),
    }  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        is_norm = "norm" in name
        scale = 0.2 if is_norm or len(shape) == 1 else shape[-1] ** -0.5
        tensors[name] = is_norm + scale * torch.randn(shape)
    # The copies of the target's tables that checkpoints hold are never read.
    tables = {f"{n}.weight": torch.zeros(1, 1) for n in ("embed_tokens", "shared_head.head")}
    prefix = f"model.layers.{config['num_hidden_layers']}."
    return {prefix + name: tensor for name, tensor in (tensors | tables).items()}


def add_module(folder: Path) -> Path:
    """Puts a module into a random target's checkpoint of one file, as the public ones hold it."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    make = module_tensors
    if text["model_type"] in LAYERS:
        make = layer_tensors
        text["num_nextn_predict_layers"] = 1
    elif text["model_type"] != "qwen3_next":
        text["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    module = make(text)
    for name, own in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        copy = f"model.layers.{text['num_hidden_layers']}.{name}.weight"
        if copy in module:
            module[copy] = tensors[f"{own}.weight"].clone()
    save_file({**tensors, **module}, file, metadata={"format": "pt"})
    return folder
