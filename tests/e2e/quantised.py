# SPDX-License-Identifier: Apache-2.0
"""The tiny target in the formats of quantised checkpoints, packed as their own tools pack them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_specplug.testing.target import make_target

GROUP = 32
# AWQ packs eight columns of an int32 in this order.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


def pack(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight neighbours of integers 0..15 along `dim` to one int32, the first in the lowest bits."""
    parts = values.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    words = (parts << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: torch.Tensor, dim: int) -> torch.Tensor:
    """The integers that `pack` was given."""
    parts = (words.to(torch.int64)[..., None] >> (4 * torch.arange(8))) & 15
    return parts.movedim(-1, dim + 1).flatten(dim, dim + 1)


def round_groups(weight: torch.Tensor, symmetric: bool = True) -> tuple[torch.Tensor, ...]:
    """Integers 0..15 [out, in], scales [out, groups] and zero points [out, groups] of groups of
    `GROUP` inputs."""
    groups = weight.unflatten(1, (-1, GROUP))
    if symmetric:
        scale = groups.abs().amax(-1, keepdim=True) / 7
        zero = torch.full_like(scale, 8)
    else:
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (high - low) / 15
        zero = (-low / scale).round().clamp(0, 15)
    values = (groups / scale + zero).round().clamp(0, 15)
    return values.flatten(1), scale.squeeze(-1), zero.squeeze(-1)


def _int8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {
        "weight": (weight / scale).round().clamp(-127, 127).to(torch.int8),
        "weight_scale": scale,
    }


def _w4a16(weight: torch.Tensor, symmetric: bool = True) -> Tensors:
    values, scale, zero = round_groups(weight, symmetric)
    zeros = {} if symmetric else {"weight_zero_point": pack(zero, 0)}
    return {
        "weight_packed": pack(values, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
        **zeros,
    }


def _gptq(weight: torch.Tensor) -> Tensors:
    values, scale, zero = round_groups(weight)
    return {
        "qweight": pack(values.t(), 0),
        "scales": scale.t(),
        # One less than the zero point, as these tools write it.
        "qzeros": pack(zero.t() - 1, 1),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _awq(weight: torch.Tensor) -> Tensors:
    values, scale, zero = round_groups(weight, symmetric=False)

    def packed(columns: torch.Tensor) -> torch.Tensor:
        ordered = columns.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1)
        return pack(ordered, 1)

    return {"qweight": packed(values.t()), "scales": scale.t(), "qzeros": packed(zero.t())}


def _fp8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _compressed(layout: str, weights: Any, inputs: Any, head: bool) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": [] if head else ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear", *(["re:.*lm_head"] if head else [])],
                "weights": weights,
                "input_activations": inputs,
            }
        },
    }


def _numbers(bits: int, kind: str, strategy: str, dynamic: bool = False, **rest: Any) -> Any:
    return {
        "num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy,
        "dynamic": dynamic, **rest,
    }  # fmt: skip


# Scheme -> the tensors of one matrix [out, in], and the config's entry by whether the LM head is
# quantised too.
SCHEMES: dict[str, tuple[Callable[[torch.Tensor], Tensors], Callable[[bool], dict[str, Any]]]] = {
    "int8": (
        _int8,
        lambda head: _compressed(
            "int-quantized", _numbers(8, "int", "channel"), _numbers(8, "int", "token", True), head
        ),
    ),
    "w4a16": (
        _w4a16,
        lambda head: _compressed(
            "pack-quantized", _numbers(4, "int", "group", group_size=GROUP), None, head
        ),
    ),
    "w4a16-zeros": (
        lambda weight: _w4a16(weight, symmetric=False),
        lambda head: _compressed(
            "pack-quantized",
            _numbers(4, "int", "group", group_size=GROUP) | {"symmetric": False},
            None,
            head,
        ),
    ),
    "gptq": (
        _gptq,
        lambda head: {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False,
            "sym": True, "lm_head": head,
        },
    ),
    "awq": (
        _awq,
        lambda head: {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
            "version": "gemm", "lm_head": head,
        },
    ),
    "fp8-channels": (
        _fp8,
        lambda head: _compressed(
            "float-quantized", _numbers(8, "float", "channel"),
            _numbers(8, "float", "token", True), head,
        ),
    ),
}  # fmt: skip


def dequantised(stored: Tensors, prefix: str) -> torch.Tensor:
    """The matrix [out, in] in float32 that a checkpoint's tensors `prefix`... stand for."""
    of = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
    if "weight" in of:
        return of["weight"].float() * of.get("weight_scale", 1.0)
    if "weight_packed" in of:
        values, scale = unpack(of["weight_packed"], 1), of["weight_scale"]
        zero = unpack(of["weight_zero_point"], 0) if "weight_zero_point" in of else 8
    elif "g_idx" in of:
        values, scale = unpack(of["qweight"], 0).t(), of["scales"].t()
        zero = unpack(of["qzeros"], 1).t() + 1
    else:
        back = torch.tensor(_AWQ_ORDER).argsort()
        columns = [unpack(of[name], 1).unflatten(1, (-1, 8)) for name in ("qweight", "qzeros")]
        values, zero = (c[..., back].flatten(1).t() for c in columns)
        scale = of["scales"].t()
    shift = zero[..., None] if isinstance(zero, torch.Tensor) else zero
    return ((values.unflatten(1, (-1, GROUP)) - shift) * scale[..., None]).flatten(1)


def make_quantised_target(
    folder: Path, vocab_size: int, scheme: str, *, head: bool, tied: bool = False, seed: int = 0
) -> Path:
    """`make_target` in a quantised format. With `head` the LM head as well; `tied` leaves it out,
    for the embedding to serve."""
    make_target(folder, vocab_size, seed=seed)
    quantise, config_entry = SCHEMES[scheme]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if tied:
        del tensors["lm_head.weight"]
    for name in list(tensors):
        if name.endswith("_proj.weight") or (head and name == "lm_head.weight"):
            prefix = name.removesuffix("weight")
            for suffix, tensor in quantise(tensors.pop(name)).items():
                tensors[prefix + suffix] = tensor.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config_entry(head)
    config["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config))
    return folder
