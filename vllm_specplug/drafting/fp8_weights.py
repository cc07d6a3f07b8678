# SPDX-License-Identifier: Apache-2.0
"""Weights that a checkpoint stores in float8_e4m3fn, with their scales in another tensor.

A matrix [.., N, M] has a scale per block of rows and columns, a scale per row, or one scale. Its
numbers are the stored ones times the scale. Checkpoints with the `quant_method` "fp8" or
"compressed-tensors" have such files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_specplug.options import is_integer

# Rows and columns that share a scale
Block = tuple[int, int]
# The scale of X is X_scale_inv or X_scale; both are factors.
SCALE_SUFFIXES = ("_scale_inv", "_scale")
# Scales of a layer's inputs, which weights do not need.
INPUT_SCALES = ("input_scale", "activation_scale")
_MAX_BLOCK = 1 << 24


def stated_blocks(config: Mapping[str, Any]) -> list[Block | None]:
    """Returns the block of each fp8 format in a parsed `config.json`; None for a scale per row or
    matrix.

    Raises:
        ValueError: for blocks of an illegal size.
    """
    stated = config.get("quantization_config") or {}
    stated = stated or (config.get("text_config") or {}).get("quantization_config") or {}
    if stated.get("quant_method") == "fp8":
        return [_block(stated.get("weight_block_size"))]
    groups: Mapping[str, Any] = {}
    if stated.get("quant_method") == "compressed-tensors":
        groups = stated.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    # Without blocks the shape of the scales tells whether they are per row or matrix.
    return [
        _block(group.get("block_structure"))
        for group in weights
        if (group.get("num_bits"), group.get("type")) == (8, "float")
    ]


def _block(value: Any) -> Block | None:
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}x[0-9]{1,9}", value):
        # compressed-tensors also reads "128x128".
        value = [int(size) for size in value.split("x")]
    is_pair = isinstance(value, Sequence) and len(value) == 2
    if not is_pair or not all(is_integer(size) and 0 < size <= _MAX_BLOCK for size in value):
        raise ValueError(
            f"quantization_config: blocks of {repr(value)[:100]}, legal: [rows, columns], two "
            f"integers from 1 to {_MAX_BLOCK}; fetch the checkpoint again"
        )
    return value[0], value[1]


def scale_shapes(
    shape: tuple[int, ...], blocks: Sequence[Block | None]
) -> dict[tuple[int, ...], Block]:
    """Returns the legal shapes of the scales of a weight [.., N, M], with the block of each."""
    *outer, rows, columns = shape
    all_rows, all_columns = max(1, rows), max(1, columns)
    found: dict[tuple[int, ...], Block] = {}
    for block in blocks:
        if block is None:
            found |= dict.fromkeys(((), (1,)), (all_rows, all_columns))
            found[(*outer, 1, 1)] = (all_rows, all_columns)
            found[(*outer, rows, 1)] = (1, all_columns)
        else:
            found[(*outer, -(-rows // block[0]), -(-columns // block[1]))] = block
    return found


def dequantise(
    weight: torch.Tensor, scales: torch.Tensor, block: Block, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the numbers of a weight, one matrix after the other.

    Args:
        weight: float8 [.., N, M].
        scales: float32, of the shape that `scale_shapes` has for the block.
    """
    if not weight.numel():
        # The other side of an empty matrix may be of any size.
        return torch.empty(weight.shape, dtype=dtype)
    *outer, rows, columns = weight.shape
    row, column = torch.arange(rows) // block[0], torch.arange(columns) // block[1]
    last = (-(-rows // block[0]), -(-columns // block[1]))
    scales = scales.expand(*outer, *last).reshape(math.prod(outer), *last)
    made = torch.empty(len(scales), rows, columns, dtype=dtype)
    for to, stored, factors in zip(made, weight.view(made.shape), scales, strict=True):
        to.copy_(stored.float() * factors[row][:, column])
    return made.view(weight.shape)
