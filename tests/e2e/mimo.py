# SPDX-License-Identifier: Apache-2.0
"""A random target in the layout of the public MiMo-7B repositories, with its module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# The config class that such repositories ship beside the weights: Qwen2's with one field more.
_CONFIG_CODE = """from transformers.models.qwen2.configuration_qwen2 import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, *args, num_nextn_predict_layers=0, **kwargs):
        self.num_nextn_predict_layers = num_nextn_predict_layers
        super().__init__(*args, **kwargs)
"""
PREFIX = "model.mtp_layers.0."


def module_tensors(config: dict[str, Any], seed: int = 6) -> dict[str, torch.Tensor]:
    """Random tensors of one module by their public names."""
    torch.manual_seed(seed)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_layernorm.weight": (hidden,), "hidden_layernorm.weight": (hidden,),
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        "final_layernorm.weight": (hidden,), "input_proj.weight": (hidden, 2 * hidden),
        "self_attn.q_proj.weight": (q, hidden), "self_attn.q_proj.bias": (q,),
        "self_attn.k_proj.weight": (kv, hidden), "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, hidden), "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, q), "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden), "mlp.down_proj.weight": (hidden, width),
    }  # fmt: skip
    return {
        PREFIX + name: 1 + 0.2 * torch.randn(shape)
        if name.endswith("norm.weight")
        else torch.randn(shape) * (0.1 if name.endswith("bias") else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def make_mimo_target(folder: Path, vocab_size: int, *, seed: int = 0) -> Path:
    """A random float32 target of peaked distributions; its folder needs `trust_remote_code`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
            tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 640000.0},
        )
    ).float()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(2.5)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_mimo.py").write_text(_CONFIG_CODE)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **module_tensors(config)}, file, metadata={"format": "pt"})
    return folder
