# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels that process rows one by one: norms, rotations and candidates."""

from __future__ import annotations

from typing import Any

from tests.ptx.triton_compile import Compiled, compile_kernel


def row_kernels(arch: int) -> list[Compiled]:
    """Between the products of a draft layer of 4,096 numbers, 32 query and 8 KV heads of 128."""
    from vllm_specplug.kernels import row_ops_triton as kernels

    strides = ("x_row", "delta_row", "x_head", "size")
    types = {
        **dict.fromkeys(("x", "delta", "weight", "cos", "sin", "total", "output"), "*bf16"),
        **dict.fromkeys((*strides, "num_heads", "num_positions"), "i32"),
        "positions": "*i64",
        "scales": "*fp32",
        "eps": "fp32",
    }
    cases: list[tuple[str, Any, dict[str, Any], int]] = [
        ("norm_rows", kernels._norm_rows_kernel, {"SIZE": 4096, "BLOCK": 4096, "ADDS": True}, 8),
        (
            "norm_rotate",
            kernels._norm_rotate_kernel,
            {
                "HEAD_DIM": 128,
                "PADDED_DIM": 128,
                "TURNED": 128,
                "HEADS": kernels._HEAD_NUMBERS // 128,
                "NORMS": True,
            },
            4,
        ),
        ("gated_silu", kernels._gated_silu_kernel, {"BLOCK": kernels._COLUMNS}, 4),
    ]
    if arch >= 90:
        rounded = {"SIZE": 20480, "BLOCK": 32768, "LARGEST": 448.0}
        cases.append(("round_rows", kernels._round_rows_kernel, rounded, 32))
    return [
        compile_kernel(
            name, kernel, arch,
            {n: types[n] for n in kernel.arg_names if n not in constants}
            | ({"output": "*fp8e4nv"} if name == "round_rows" else {}), constants,
            aligned=tuple(
                n for n in kernel.arg_names
                if n in strides or n != "positions" and types.get(n, "")[:1] == "*"
            ),
            num_warps=warps,
        )
        for name, kernel, constants, warps in cases
    ]  # fmt: skip


def candidate_kernels(arch: int) -> list[Compiled]:
    """The likeliest of 151,936 logits in bfloat16."""
    from vllm_specplug.kernels import top_candidates_triton as kernels

    types = {
        "logits": "*bf16",
        **dict.fromkeys(("part_values", "part_lse", "log_probs"), "*fp32"),
        "part_ids": "*i32",
        "ids_out": "*i64",
        **dict.fromkeys(("row_stride", "vocab", "count", "part_chunks", "num_parts"), "i32"),
    }
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "part_candidates": (kernels._part_candidates_kernel, {"CHUNK": kernels._CHUNK}),
        "merge_candidates": (kernels._merge_candidates_kernel, {"SLOTS": kernels._SLOTS}),
    }
    return [
        compile_kernel(
            name, kernel, arch, {n: types[n] for n in kernel.arg_names if n in types}, constants,
            aligned=tuple(n for n in ("logits", "row_stride", "vocab") if n in kernel.arg_names),
        )
        for name, (kernel, constants) in cases.items()
    ]  # fmt: skip
