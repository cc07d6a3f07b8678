# SPDX-License-Identifier: Apache-2.0
"""Heads on disk in each layout of their trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.unit.methods.eagle3_tree import published
from tests.unit.methods.eagle3_tree.published import small, tensors_of

# Name of the config, prefix of the layer's tensors, and the file that holds them.
LAYOUTS: dict[str, tuple[str, str, str]] = {
    "yuhuili": ("EAGLE_LLAMA3_8B", "midlayer.", "pytorch_model.bin"),
    "specforge": ("SPECFORGE_QWEN3_4B", "midlayer.", "model.safetensors"),
    "specforge_eagle31": ("SPECFORGE_QWEN3_30B_EAGLE31", "midlayer.", "model.safetensors"),
    "speculators": ("SPECULATORS_GEMMA4_31B", "layers.0.", "model.safetensors"),
    "speculators_window": ("SPECULATORS_QWEN3_8B_WINDOW", "layers.0.", "model.safetensors"),
    "speculators_layers": ("SPECULATORS_QWEN3_8B_LAYERS", "layers.0.", "model.safetensors"),
    "specforge_peagle": ("SPECFORGE_PEAGLE_QWEN3_8B", "layers.0.", "model.safetensors"),
    "speculators_peagle": ("SPECULATORS_PEAGLE_QWEN3_8B", "layers.0.", "model.safetensors"),
    "modelopt": ("MODELOPT_LLAMA31_8B", "layers.0.", "model.safetensors"),
    "modelopt_megatron": ("MODELOPT_LLAMA31_8B", "midlayer.", "model.safetensors"),
    "angelslim": ("ANGELSLIM_QWEN3_8B", "midlayer.", "model.safetensors"),
    "deepspec": ("DEEPSPEC_QWEN3_4B", "layers.0.", "model.safetensors"),
    "specforge_mrope": ("SPECFORGE_QWEN25_VL_7B", "midlayer.", "model.safetensors"),
}


def write_head(
    folder: Path, layout: str, *, extra: dict[str, torch.Tensor] | None = None, **changes: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A small head of a layout with random weights; its config and tensors."""
    name, prefix, file = LAYOUTS[layout]
    raw = small(getattr(published, name), **changes)
    tensors = {**tensors_of(raw, prefix=prefix), **(extra or {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return raw, tensors
