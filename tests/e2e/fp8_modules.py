# SPDX-License-Identifier: Apache-2.0
"""Tensors of a module in fp8 with scales, as released checkpoints hold them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# `quantization_config` of DeepSeek-V3.1's and Qwen3.6's configs, and of GLM-4.5's, in short.
BLOCKS: dict[str, Any] = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128],
}  # fmt: skip
CHANNELS: dict[str, Any] = {
    "config_groups": {"group_0": {
        "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"},
        "targets": ["Linear"],
        "weights": {"dynamic": False, "num_bits": 8, "strategy": "channel", "type": "float"},
    }},
    "format": "float-quantized", "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
# What such releases leave as it is, beside vectors.
_PLAIN = (
    "eh_proj.",
    "mtp.fc.",
    "mlp.gate.",
    "shared_expert_gate.",
    "embed_tokens.",
    "shared_head.",
)


def in_fp8(
    tensors: dict[str, torch.Tensor], quantization: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The stored tensors, and the numbers that they stand for, which bfloat16 holds exactly."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or any(part in name for part in _PLAIN):
            stored[name] = meant[name] = tensor
            continue
        sizes = quantization.get("weight_block_size") or (1, tensor.shape[-1])
        stored[name], scales, meant[name] = quantised(tensor, sizes)
        suffix = "_scale_inv" if "weight_block_size" in quantization else "_scale"
        stored[name + suffix] = scales
    return stored, meant


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with joined experts split by expert, as in Qwen's releases in fp8."""
    made = dict(tensors)
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        for full_name in [n for n in tensors if n.endswith(f"experts.{name}")]:
            for expert, joined in enumerate(made.pop(full_name)):
                prefix = f"{full_name.removesuffix(name)}{expert}."
                for part, rows in zip(parts, joined.chunk(len(parts)), strict=True):
                    made[f"{prefix}{part}_proj.weight"] = rows.clone()
    return made


def quantised(
    tensor: torch.Tensor, sizes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor [.., N, M] in fp8, the scales of its blocks, and what they stand for."""
    counts = [math.ceil(n / size) for n, size in zip(tensor.shape[-2:], sizes, strict=True)]
    stored = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    scales, meant = torch.empty(*tensor.shape[:-2], *counts), torch.empty(tensor.shape)
    for i in range(counts[0]):
        for j in range(counts[1]):
            rows = slice(i * sizes[0], (i + 1) * sizes[0])
            columns = slice(j * sizes[1], (j + 1) * sizes[1])
            block = tensor[..., rows, columns].float()
            # Rounded to the three digits behind the point that a number in fp8 has, too.
            mantissa, exponent = torch.frexp(block.abs().amax((-2, -1), keepdim=True) / 256)
            scale = torch.ldexp((mantissa * 16).round() / 16, exponent)
            stored[..., rows, columns] = (block / scale).to(torch.float8_e4m3fn)
            meant[..., rows, columns] = stored[..., rows, columns].float() * scale
            scales[..., i, j] = scale[..., 0, 0]
    return stored, scales, meant


def write_checkpoints(folder: Path, prefix: str, quantization: dict[str, Any]) -> tuple[Path, Path]:
    """Writes the target in `folder` with its module in fp8, and with the module's numbers in
    bfloat16. The target itself stays as it is.

    Args:
        prefix: of the module's tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    module = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    stored, meant = in_fp8(module, quantization)
    plain = {name: t if t is module[name] else t.bfloat16() for name, t in meant.items()}
    ignored = "modules_to_not_convert" if quantization["quant_method"] == "fp8" else "ignore"
    names = sorted(name.removesuffix(".weight") for name, t in tensors.items() if t.ndim > 1)
    stated = {"quantization_config": {**quantization, ignored: names}}
    folders = folder.with_name("fp8"), folder.with_name("bf16")
    for to, own, more in zip(folders, (stored, plain), (stated, {}), strict=True):
        shutil.copytree(folder, to)
        (to / "config.json").write_text(json.dumps(config | more))
        save_file({**tensors, **own}, to / "model.safetensors", metadata={"format": "pt"})
    return folders
