# SPDX-License-Identifier: Apache-2.0
"""Random multi-token-prediction modules in the layouts of Qwen3.5's repositories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Of Qwen3.5's checkpoints; speculators writes the same tensors by the other names.
NAMES = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}


def module_tensors(config: dict[str, Any], seed: int = 6) -> dict[str, torch.Tensor]:
    """Random tensors of the module of a dense text model, by their public names."""
    torch.manual_seed(seed)
    hidden, width, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
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
        "layers.0.mlp.gate_proj.weight": (width, hidden),
        "layers.0.mlp.up_proj.weight": (width, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, width),
    }  # fmt: skip
    return {
        f"mtp.{name}": torch.randn(shape) * (0.2 if "norm" in name else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def add_module(folder: Path) -> Path:
    """Puts a module into a random target's checkpoint of one file, as the public ones hold it."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    save_file({**load_file(file), **module_tensors(text)}, file, metadata={"format": "pt"})
    return folder
