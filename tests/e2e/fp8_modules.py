# SPDX-License-Identifier: Apache-2.0
"""Tensors of a module in fp8 with scales, as released checkpoints hold them."""

from __future__ import annotations

import json
import math
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
_PLAIN = ("eh_proj.", "mtp.fc.", "mlp.gate.", "shared_expert_gate.", "embed_tokens.", "shared_head.")


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


def write_modules(folder: Path, prefix: str, quantization: dict[str, Any]) -> tuple[Path, Path]:
    """The folders of the module of a target in `folder`: in fp8, and its numbers in bfloat16.

    Args:
        prefix: of the module's tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    module = {n: t for n, t in load_file(folder / "model.safetensors").items() if prefix in n}
    stored, meant = in_fp8(module, quantization)
    plain = {n: t if torch.equal(t, module[n]) else t.bfloat16() for n, t in meant.items()}
    folders = folder.parent / "fp8", folder.parent / "bf16"
    for to, tensors, more in zip(
        folders, (stored, plain), ({"quantization_config": quantization}, {}), strict=True
    ):
        to.mkdir()
        (to / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, to / "model.safetensors")
    return folders
