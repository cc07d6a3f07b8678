# SPDX-License-Identifier: Apache-2.0
"""Targets and heads in other number formats."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.tiny import make_head, make_target

VOCAB = 300
BFLOAT16_MARGIN = 2.0**-5
SCALES = {"k_scale": 0.02, "v_scale": 0.01}


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="specplug-numbers-"))


@cache
def head() -> Path:
    return make_head(folder() / "head", VOCAB)


@cache
def scaled_target() -> Path:
    """A target whose checkpoint asks for an fp8 cache and brings scales, far from 1."""
    target = make_target(folder() / "scaled", VOCAB)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {},
        "ignore": [], "quantization_status": "compressed",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True,
                            "strategy": "tensor", "dynamic": False},
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    file = target / "model.safetensors"
    tensors = load_file(file)
    for layer in range(config["num_hidden_layers"]):
        for name, scale in SCALES.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale * (layer + 1)])
    save_file(tensors, file, metadata={"format": "pt"})
    return target
