# SPDX-License-Identifier: Apache-2.0
"""Weights in fp8 are read as the stored numbers times the scale of their block, row or matrix."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.e2e.fp8_modules import BLOCKS, CHANNELS, quantised
from tests.unit.methods.absurd import ABSURD, taken_or_refused
from vllm_specplug.drafting.checkpoint_files import read_safetensors
from vllm_specplug.drafting.fp8_weights import stated_blocks

NAME = "layers.0.mlp.up_proj.weight"


def blocks(rows: int, columns: int) -> dict[str, Any]:
    return {**BLOCKS, "weight_block_size": [rows, columns]}


def groups(**weights: Any) -> dict[str, Any]:
    """compressed-tensors' config with other weights."""
    made = copy.deepcopy(CHANNELS)
    made["config_groups"]["group_0"]["weights"] |= weights
    return made


def read(
    folder: Path, tensors: dict[str, torch.Tensor], quantization: Any, **how: Any
) -> dict[str, torch.Tensor]:
    config = {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, file)
    return read_safetensors([file], **how)


def by_equation(weight: torch.Tensor, scales: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    """Every number by itself."""
    made = torch.empty(weight.shape)
    for *outer, i, j in torch.cartesian_prod(*map(torch.arange, weight.shape)).tolist():
        factor = scales.float()[(*outer, i // sizes[0], j // sizes[1])]
        made[(*outer, i, j)] = weight.float()[(*outer, i, j)] * factor
    return made


# Shape of the weight, `quantization_config`, suffix and shape of the scales, block.
CASES: dict[str, tuple[tuple[int, ...], Any, str, tuple[int, ...], tuple[int, int]]] = {
    "blocks": ((10, 13), blocks(4, 8), "_scale_inv", (3, 2), (4, 8)),
    "whole blocks": ((8, 8), blocks(4, 4), "_scale_inv", (2, 2), (4, 4)),
    "blocks larger than the matrix": ((3, 5), blocks(128, 128), "_scale_inv", (1, 1), (128, 128)),
    "joined experts": ((2, 10, 13), blocks(4, 8), "_scale_inv", (2, 3, 2), (4, 8)),
    "groups with blocks": (
        (10, 13), groups(strategy="block", block_structure=[4, 8]), "_scale", (3, 2), (4, 8),
    ),
    "groups with blocks as a string": (
        (10, 13), groups(strategy="block", block_structure="4x8"), "_scale", (3, 2), (4, 8),
    ),
    "channels": ((10, 13), CHANNELS, "_scale", (10, 1), (1, 13)),
    "joined channels": ((2, 10, 13), CHANNELS, "_scale", (2, 10, 1), (1, 13)),
    "tensor": ((10, 13), groups(strategy="tensor"), "_scale", (1,), (10, 13)),
    "channels by default": ((10, 13), groups(strategy=None), "_scale", (10, 1), (1, 13)),
    "one per joined expert": ((2, 10, 13), {"quant_method": "fp8"}, "_scale", (2, 1, 1), (10, 13)),
    "scalar": ((10, 13), {"quant_method": "fp8"}, "_scale", (), (10, 13)),
    "scalar for transformers": ((10, 13), {"quant_method": "fp8"}, "_scale_inv", (), (10, 13)),
}  # fmt: skip


def stored(case: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tensors of a case, and what they stand for."""
    shape, _, suffix, scale_shape, sizes = CASES[case]
    torch.manual_seed(len(case))
    weight = (8 * torch.randn(shape)).to(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape) + 0.1
    full = (*shape[:-2], *(math.ceil(n / b) for n, b in zip(shape[-2:], sizes, strict=True)))
    return {NAME: weight, NAME + suffix: scales}, by_equation(weight, scales.expand(full), sizes)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_equation(case: str, tmp_path: Path) -> None:
    tensors, expected = stored(case)
    found = read(tmp_path, {**tensors, "norm.weight": torch.ones(3)}, CASES[case][1])
    assert found.keys() == {NAME, "norm.weight"}
    assert torch.equal(found[NAME], expected)
    found = read(tmp_path, tensors, CASES[case][1], dtype=torch.bfloat16)
    assert found[NAME].dtype == torch.bfloat16 and torch.equal(found[NAME], expected.bfloat16())
    headers = read(tmp_path, tensors, CASES[case][1], headers_only=True)
    assert headers.keys() == {NAME} and headers[NAME].shape == expected.shape
    # Controls: the test tells scales apart.
    suffix, scales = CASES[case][2], tensors[NAME + CASES[case][2]]
    if scales.numel() > 1:
        shifted = scales.roll(1, 0)
        found = read(tmp_path, {**tensors, NAME + suffix: shifted}, CASES[case][1])
        assert not torch.equal(found[NAME], expected)
    if case == "whole blocks":
        turned = scales.T.contiguous()
        found = read(tmp_path, {**tensors, NAME + suffix: turned}, CASES[case][1])
        assert not torch.equal(found[NAME], expected)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.bfloat16, torch.float16])
def test_scales_of_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, _ = stored("blocks")
    scales = torch.tensor([[0.5, 4.0], [2.0**-7, 1.0], [0.25, 2.0]])
    tensors[f"{NAME}_scale_inv"] = scales.to(dtype)
    expected = by_equation(tensors[NAME], scales, (4, 8))
    assert torch.equal(read(tmp_path, tensors, blocks(4, 8))[NAME], expected)


def test_scales_in_another_shard_and_of_inputs(tmp_path: Path) -> None:
    tensors, expected = stored("blocks")
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    inputs = NAME.replace("weight", "input_scale")
    save_file({f"{NAME}_scale_inv": tensors[f"{NAME}_scale_inv"]}, first)
    save_file({NAME: tensors[NAME], inputs: torch.ones(1)}, second)
    config = {"text_config": {"quantization_config": blocks(4, 8)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_safetensors([first, second])
    assert found.keys() == {NAME} and torch.equal(found[NAME], expected)


def test_the_quantiser_of_the_tests_rounds_little() -> None:
    torch.manual_seed(2)
    tensor = torch.randn(10, 13)
    weight, scales, meant = quantised(tensor, (4, 8))
    assert torch.equal(meant, by_equation(weight, scales, (4, 8)))
    assert torch.equal(meant, meant.bfloat16().float())
    assert 0 < float((meant - tensor).abs().max()) < 0.07 * float(tensor.abs().max())


SHAPED = r"scales of the fp8 tensor 'layers.0.mlp.up_proj.weight' \[10, 13\] are "
STATED = "has dtype F8_E4M3, legal: BF16, F16, F32, F64; matrices in F8_E4M3 need a quantization_"


@pytest.mark.parametrize(
    ("quantization", "scales", "message"),
    [
        (blocks(4, 8), None, SHAPED + r"none, legal: .*_scale_inv or .*_scale of shape \[3, 2\],"),
        (blocks(4, 8), torch.ones(2, 3), SHAPED + r".*_scale_inv \[2, 3\], legal: .* \[3, 2\],"),
        (blocks(4, 8), torch.ones(10, 1), SHAPED + r".*\[10, 1\], legal: .* \[3, 2\],"),
        (blocks(0, 8), torch.ones(3, 2), r"blocks of \[0, 8\], legal: \[rows, columns\], two"),
        (groups(block_structure="0x8"), torch.ones(3, 2), r"blocks of \[0, 8\], legal: \[rows"),
        (groups(block_structure="4x8x2"), torch.ones(3, 2), "blocks of '4x8x2', legal: "),
        (blocks(4, 8), torch.full((3, 2), math.nan), "scale_inv' holds 6 values that are not fini"),
        (blocks(4, 8), torch.full((3, 2), math.inf), "scale_inv' holds 6 values that are not fini"),
        (blocks(4, 8), torch.full((3, 2), 3e38), "up_proj.weight' are not finite in torch.float3"),
        (blocks(1 << 30, 8), torch.ones(1, 2), r"blocks of \[1073741824, 8\], legal: \[rows, col"),
        (blocks(4, 8), torch.ones(3, 2, dtype=torch.int8), "scale_inv' has dtype I8, legal: BF16,"),
        (CHANNELS, torch.ones(10), SHAPED + r".*\[10\], legal: .* \[\] or \[1\] or \[1, 1\] or "),
        (None, torch.ones(3, 2), STATED),
        ({"quant_method": "modelopt"}, torch.ones(3, 2), STATED),
        (groups(num_bits=4), torch.ones(10, 1), STATED),
        (groups(type="int"), torch.ones(10, 1), STATED),
        (groups(strategy="group"), torch.ones(10, 4), SHAPED + r".*\[10, 4\], legal: .* \[10, 1"),
    ],
)  # fmt: skip
def test_other_scales_are_refused(
    quantization: Any, scales: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    tensors, _ = stored("blocks")
    del tensors[f"{NAME}_scale_inv"]
    if scales is not None:
        tensors[f"{NAME}_scale_inv"] = scales
    with pytest.raises(ValueError, match=message):
        read(tmp_path, tensors, quantization)


def test_an_empty_matrix_takes_no_memory(tmp_path: Path) -> None:
    tensors = {NAME: torch.empty(0, 10**12, dtype=torch.float8_e4m3fn)}
    tensors[f"{NAME}_scale_inv"] = torch.empty(0, 10**12 // 8)
    assert read(tmp_path, tensors, blocks(4, 8))[NAME].shape == (0, 10**12)


def test_numbers_that_the_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    tensors, _ = stored("blocks")
    tensors[f"{NAME}_scale_inv"] *= 1e6
    with pytest.raises(ValueError, match="not finite in torch.float16; serve the target in bfloat"):
        read(tmp_path, tensors, blocks(4, 8), dtype=torch.float16)


def test_vectors_and_other_formats_are_refused(tmp_path: Path) -> None:
    for name, dtype in (("norm.weight", torch.float8_e4m3fn), (NAME, torch.float8_e5m2)):
        shape = (10,) if "norm" in name else (10, 13)
        tensors = {name: torch.ones(shape).to(dtype), f"{name}_scale_inv": torch.ones(3, 2)}
        with pytest.raises(ValueError, match=f"'{name}' has dtype F8_E"):
            read(tmp_path, tensors, blocks(4, 8))


@given(value=ABSURD, field=st.sampled_from(["", "config_groups", "group_0", "weights", "strategy",
                                            "block_structure", "weight_block_size"]))  # fmt: skip
def test_absurd_configs(value: Any, field: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    quantization: Any = groups(strategy="block", block_structure=[4, 8])
    group = quantization["config_groups"]["group_0"]
    if not field:
        quantization = value
    elif field == "weight_block_size":
        quantization = {**BLOCKS, field: value}
    else:
        holders = {"config_groups": quantization, "group_0": quantization["config_groups"],
                   "weights": group}  # fmt: skip
        holders.get(field, group["weights"])[field] = value
    tensors, _ = stored("blocks")
    taken_or_refused(lambda: read(tmp_path_factory.mktemp("x"), tensors, quantization))


def test_blocks_that_configs_state() -> None:
    assert stated_blocks({"quantization_config": BLOCKS}) == [(128, 128)]
    assert stated_blocks({"quantization_config": CHANNELS}) == [None]
    assert stated_blocks({}) == []
