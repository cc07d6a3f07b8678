# SPDX-License-Identifier: Apache-2.0
"""Which tree attention serves on a CUDA device: CuTe, else Triton. The readable torch version
waits for the host, and serves only where it is asked for by name.

A kernel serves when it takes the shape and agrees with the reference on this very device. The
CuTe kernel comes first only where a recorded run of the correctness suite vouches for its sources
on this architecture; asked for by name it is tried anyway.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .metadata import TreeAttnMetadata
from .reference import tree_attn_cuda_reference

logger = logging.getLogger(__name__)

CUDA_KERNELS = ("cute", "triton", "reference")
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MIN_TRITON_CAPABILITY = (8, 0)
_MAX_TRITON_HEAD_DIM = 256
# Written by the correctness suite on a device: {"passed": true, "capability": [9, 0], "sources":
# digest, ...}.
RECORD_NAME = "cute_correctness.json"

TreeAttnFn = Callable[..., None]


@dataclass(frozen=True)
class KernelShape:
    """What a kernel must take to serve a model."""

    head_dim: int
    dtype: torch.dtype
    block_size: int
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class ChosenKernel:
    """The kernel that serves, and why."""

    name: str
    run: TreeAttnFn
    reason: str


def cute_sources_digest() -> str:
    """Digest of the CuTe kernel's sources, as correctness records name it."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("cute/*.py"), *folder.glob("*cute*.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def record_paths() -> list[Path]:
    """Where a correctness record may lie: beside the sources, or in a checkout's results."""
    folder = Path(__file__).resolve().parent
    return [folder / RECORD_NAME, folder.parents[1] / "bench" / "results" / RECORD_NAME]


def cute_unverified_reason(capability: tuple[int, int]) -> str | None:
    """Why no recorded run vouches for the CuTe kernel on `capability`; None where one does."""
    problem = "no recorded run of its correctness suite"
    for path in record_paths():
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            problem = f"{path.name} cannot be read ({error})"
            continue
        if not record.get("passed"):
            problem = "its recorded correctness run failed"
        elif tuple(record.get("capability", ())) != capability:
            problem = f"its recorded run was on compute capability {record.get('capability')}"
        elif record.get("sources") != cute_sources_digest():
            problem = "its sources changed since the recorded correctness run"
        else:
            return None
    return problem


def unsupported_by(name: str, shape: KernelShape, capability: tuple[int, int]) -> str | None:
    """Why kernel `name` cannot serve `shape` on a device of `capability`; None when it can."""
    if name == "reference":
        return None
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} query heads over {shape.num_kv_heads} KV heads"
    if name == "triton":
        if capability < _MIN_TRITON_CAPABILITY:
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
        if shape.dtype not in _TRITON_DTYPES:
            return f"dtype {shape.dtype}"
        if shape.head_dim > _MAX_TRITON_HEAD_DIM or shape.head_dim % 8:
            return f"head_dim {shape.head_dim} (multiples of 8 up to {_MAX_TRITON_HEAD_DIM})"
        return None
    try:
        from .tree_attn_cute_sm90 import unsupported_reason
    except ImportError as error:
        return f"it cannot be imported ({error})"
    return unsupported_reason(capability, shape.head_dim, shape.dtype, shape.block_size)


def load_kernel(name: str) -> TreeAttnFn:
    """The call of kernel `name`, see `cuda_contract`."""
    if name == "cute":
        from .tree_attn_cute_sm90 import tree_attn_cute

        return tree_attn_cute
    if name == "triton":
        from .tree_attn_triton import tree_attn_triton

        return tree_attn_triton
    return tree_attn_cuda_reference


def choose_cuda_kernel(
    requested: str, shape: KernelShape, device: torch.device, capability: tuple[int, int]
) -> ChosenKernel:
    """The first kernel from `requested` (or "auto") on that serves here, with one warning for
    those passed over.

    Raises:
        ValueError: for a name that is none of `CUDA_KERNELS` or "auto", and when no kernel but the
            reference serves and that was not asked for.
    """
    if requested not in ("auto", *CUDA_KERNELS):
        raise ValueError(
            f"tree_kernel={requested!r} does not run on CUDA; use auto, {', '.join(CUDA_KERNELS)}"
        )
    passed_over = []
    unverified = None
    names = CUDA_KERNELS if requested == "auto" else CUDA_KERNELS[CUDA_KERNELS.index(requested) :]
    for name in names:
        if name == "reference" != requested:
            break
        problem = unsupported_by(name, shape, capability)
        if problem is None and name == "cute" and requested == "auto":
            unverified = cute_unverified_reason(capability)
            if unverified is not None:
                continue
        if problem is None:
            problem = self_test_failure(name, shape, device)
        if problem is not None:
            # On another architecture the Hopper kernel is not missed.
            if not (name == "cute" and requested == "auto" and capability[0] != 9):
                passed_over.append(f"{name}: {problem}")
            continue
        if passed_over:
            logger.warning(
                "Tree attention kernels skipped (%s); using %s instead",
                "; ".join(passed_over),
                name,
            )
        reason = "requested" if requested == name else "first that runs and is correct here"
        if unverified is not None:
            reason += f"; cute is left out: {unverified}"
        return ChosenKernel(name, load_kernel(name), reason)
    raise ValueError(
        f"tree_kernel={requested!r} finds no kernel that serves {shape} here "
        f"({'; '.join(passed_over)}). Use a target and a head of other sizes, or "
        "tree_kernel='reference', which is right but far slower than plain decoding."
    )


def self_test_failure(name: str, shape: KernelShape, device: torch.device) -> str | None:
    """Runs a few trees through kernel `name` on `device`; None when it agrees with the reference.

    Never raises: a kernel that does not load or launch must not take a server down.
    """
    if name == "reference":
        return None
    try:
        error, limit = self_test_error(load_kernel(name), shape, device)
    except Exception as failure:
        text = str(failure).strip().splitlines()
        return f"{type(failure).__name__}: {text[0] if text else 'no message'}"
    if not error <= limit:
        return f"it differs from the reference by {error:.2g} (limit {limit:.2g})"
    return None


# What the doctor asks for: the attention of an 8B model in vLLM's default pages.
_USUAL_SHAPE = KernelShape(128, torch.bfloat16, 16, num_heads=32, num_kv_heads=8)


def describe_cuda(device: torch.device | None = None) -> dict[str, Any]:
    """Which tree attention would serve a usual model on this device, and why.

    Returns:
        kernel, isa (e.g. "sm_90"), supported_isas (the kernels that run and agree here), reason.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    good = [
        name
        for name in CUDA_KERNELS
        if unsupported_by(name, _USUAL_SHAPE, capability) is None
        and self_test_failure(name, _USUAL_SHAPE, device) is None
    ]
    isa = f"sm_{capability[0]}{capability[1]}"
    try:
        chosen = choose_cuda_kernel("auto", _USUAL_SHAPE, device, capability)
    except ValueError as error:
        return {"kernel": "none", "isa": isa, "supported_isas": good, "reason": str(error)}
    return {"kernel": chosen.name, "isa": isa, "supported_isas": good, "reason": chosen.reason}


def self_test_cuda(device: torch.device | None = None) -> str:
    """One line: how far the kernel that would serve is from the reference on this device.

    Raises:
        RuntimeError: if it disagrees, or none would serve.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    try:
        chosen = choose_cuda_kernel("auto", _USUAL_SHAPE, device, capability)
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    error, limit = self_test_error(chosen.run, _USUAL_SHAPE, device)
    if not error <= limit:
        raise RuntimeError(f"{chosen.name} differs from the reference by {error:.2g}")
    return f"tree_attn ({chosen.name}) agrees with the torch reference (bfloat16 {error:.1e})"


# Trees (context length, nodes) of each call: no context, around a tile, a context that is split.
# Calls differ in their largest tree, as kernels have a variant each for roots, few and many rows,
# and one that does not load must be found out here, not while serving.
_CALLS = (((0, 0), (0, 70), (63, 8), (900, 33)), ((33, 0), (0, 0)), ((65, 7),))


def self_test_error(
    run: TreeAttnFn, shape: KernelShape, device: torch.device, seed: int = 0
) -> tuple[float, float]:
    """Largest difference from the reference in float32 over a few calls, and the limit for it."""
    errors = [_call_error(run, trees, shape, device, seed) for trees in _CALLS]
    # Inputs are standard normal, so outputs are at most about 4: a few units of rounding.
    limit = {torch.float32: 1e-4, torch.float16: 1e-2}.get(shape.dtype, 6e-2)
    # One that is not a number hides from max().
    return next((e for e in errors if e != e), max(errors)), limit


def _call_error(
    run: TreeAttnFn,
    trees: tuple[tuple[int, int], ...],
    shape: KernelShape,
    device: torch.device,
    seed: int,
) -> float:
    """Largest difference from the reference in float32 in one call."""
    draw = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(device, shape.dtype)

    blocks = max(-(-(c + n + 1) // shape.block_size) for c, n in trees)
    table = torch.randperm(len(trees) * blocks, generator=draw).view(len(trees), blocks).int()
    # Memory order of vLLM's GPU cache: block, token, head, K then V.
    cache = normal(table.numel(), shape.block_size, shape.num_kv_heads, 2 * shape.head_dim)
    key_cache, value_cache = cache.split(shape.head_dim, dim=-1)
    rows = [n + 1 for _, n in trees]
    starts = np.cumsum([0, *rows])
    parents = np.concatenate(
        [[rng.integers(max(0, i - 9), i) if i else -1 for i in range(n)] for n in rows]
    )
    plan = np.array(
        [range(len(trees)), starts[:-1], rows, [c for c, _ in trees], starts[:-1]], np.int32
    )
    meta = TreeAttnMetadata(
        plan=torch.from_numpy(plan).to(device),
        parent_rows=torch.from_numpy(parents.astype(np.int32)).to(device),
        block_table=table.to(device),
        max_rows=max(rows),
        max_context=max(c for c, _ in trees),
    )
    query = normal(int(starts[-1]), shape.num_heads, shape.head_dim)
    output = torch.full_like(query, float("nan"))
    scale = shape.head_dim**-0.5
    run(query, key_cache, value_cache, output, meta, scale)
    expected = torch.empty_like(query, dtype=torch.float32)
    wide = (query.float(), key_cache.float(), value_cache.float())
    tree_attn_cuda_reference(*wide, expected, meta, scale)
    return float((output.float() - expected).abs().max())
