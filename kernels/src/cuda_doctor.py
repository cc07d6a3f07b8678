# SPDX-License-Identifier: Apache-2.0
"""The report of `specplug doctor` about the kernels on a CUDA device."""

from __future__ import annotations

from typing import Any

import torch

from .cuda_dispatch import (
    CUDA_KERNELS,
    KernelFaultError,
    KernelShape,
    choose_cuda_kernel,
    find_problem,
    load_kernel,
    self_test_error,
)

# The default shape: the attention of an 8B model in vLLM's default pages.
USUAL_SHAPE = KernelShape(128, torch.bfloat16, 16, num_heads=32, num_kv_heads=8)


def shape_text(shape: KernelShape) -> str:
    dtype = str(shape.dtype).removeprefix("torch.")
    return (
        f"{shape.num_heads} query heads over {shape.num_kv_heads} KV heads of {shape.head_dim}, "
        f"{dtype}, pages of {shape.block_size} tokens"
    )


def describe_cuda(
    device: torch.device | None = None, shape: KernelShape = USUAL_SHAPE
) -> dict[str, Any]:
    """Returns which tree attention serves layers of `shape` on this device, and why.

    Returns:
        kernel, isa (e.g. "sm_90"), supported_isas (the kernels that run and agree here), reason,
        shape (in words), kernels (of each: whether it serves, microseconds of a call where it was
        timed, and why it does not serve).
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    problems: dict[str, str | None] = {}
    kernel, times = "none", dict[str, float]()
    try:
        for name in CUDA_KERNELS:
            problems[name] = find_problem(name, shape, device, capability)
        chosen = choose_cuda_kernel(
            "auto", shape, device, capability, from_graphs=True, examined=problems
        )
        kernel, reason, times = chosen.name, chosen.reason, chosen.times
    except KernelFaultError as fault:
        problems[name] = reason = str(fault)
    except ValueError as error:
        reason = str(error)
    return {
        "kernel": kernel,
        "isa": f"sm_{capability[0]}{capability[1]}",
        "supported_isas": [name for name, problem in problems.items() if problem is None],
        "reason": reason,
        "shape": shape_text(shape),
        "kernels": {
            name: {"serves": problem is None, "us": times.get(name), "why_not": problem}
            for name, problem in problems.items()
        },
    }


def self_test_cuda(
    name: str, device: torch.device | None = None, shape: KernelShape = USUAL_SHAPE
) -> str:
    """Returns a line about the difference of kernel `name` from the reference on this device.

    Raises:
        RuntimeError: if it disagrees.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    error, limit = self_test_error(load_kernel(name), shape, device)
    if not error <= limit:
        raise RuntimeError(f"{name} differs from the reference by {error:.2g}")
    dtype = str(shape.dtype).removeprefix("torch.")
    return f"tree_attn ({name}) agrees with the torch reference ({dtype} {error:.1e})"
