# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernels in the interpreter, in a process where vLLM found no Triton.

Modules are loaded a second time, with Triton in place of vLLM's placeholder; vLLM's own stay as
they are. Every function of such a copy can be run twice, with vLLM's kernels and with ours.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from vllm_specplug.seams.listing_runner import CPU_KERNELS
from vllm_specplug.seams.seam import resolve

PREFIX = "vllm.v1.worker.gpu"


@cache
def interpreted_copy(path: str) -> ModuleType:
    """A copy of a module of vLLM whose kernels are interpreted."""
    import triton
    import triton.language as tl
    import vllm.triton_utils as utils

    found = importlib.util.find_spec(path)
    assert found is not None and found.origin is not None
    name = f"interpreted_{path.rpartition('.')[2]}"
    spec = importlib.util.spec_from_file_location(name, found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with patch.object(utils, "triton", triton), patch.object(utils, "tl", tl):
        spec.loader.exec_module(module)
    return module


@cache
def interpreted(name: str) -> ModuleType:
    """`interpreted_copy` of vllm.v1.worker.gpu.NAME."""
    import triton.language as tl
    import vllm.v1.worker.gpu.model_runner  # noqa: F401  all modules, before any copy

    # What vLLM's CPU worker does: there is nothing to wait for.
    tl.debug_barrier = lambda: None
    module = interpreted_copy(f"{PREFIX}.{name}")
    if name == "buffer_utils":
        module.UvaBuffer = resolve("vllm.v1.worker.cpu.buffer_utils:UvaBuffer")  # type: ignore[attr-defined]
        return module
    for shared in ("FusedStagedWriter", "StagedWriteTensor", "UvaBackedTensor", "_load_ptr"):
        if hasattr(module, shared):
            setattr(module, shared, getattr(interpreted("buffer_utils"), shared))
    return module


def our_kernels(name: str) -> dict[str, Any]:
    """By name in the module, what stands in for its kernels."""
    target = f"{PREFIX}.{name}:"
    module = interpreted(name)
    return {
        seam.attribute: resolve(seam.make)(getattr(module, seam.attribute))
        for seam in CPU_KERNELS.seams
        if seam.target.startswith(target)
    }


def run_both(name: str, call: Any) -> tuple[Any, Any]:
    """What `call(module)` returns with vLLM's kernels and with ours."""
    module = interpreted(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # hashes overflow
        stock = call(module)
    # Both before any patch: a replacement binds the parameters of vLLM's kernel.
    writing, own = our_kernels("buffer_utils"), our_kernels(name)
    with (
        patch.multiple(interpreted("buffer_utils"), **writing),
        patch.multiple(module, **own),
    ):
        ours = call(module)
    return stock, ours


def same(stock: Any, ours: Any, tolerance: float = 0.0) -> None:
    """Asserts that nested results are equal; NaN equals NaN."""
    if isinstance(stock, torch.Tensor):
        assert stock.dtype == ours.dtype and stock.shape == ours.shape
        torch.testing.assert_close(ours, stock, rtol=0, atol=tolerance, equal_nan=True)
    elif isinstance(stock, tuple | list):
        assert len(stock) == len(ours)
        for a, b in zip(stock, ours, strict=True):
            same(a, b, tolerance)
    else:
        assert stock == ours


def check(name: str, function: str, *arguments: Any, tolerance: float = 0.0, **options: Any) -> Any:
    """Runs a function of vLLM's with both kernels on copies of its arguments; what it returns and
    what becomes of its arguments must be the same. Returns vLLM's."""

    def call(module: ModuleType) -> Any:
        copies, named = copy.deepcopy(arguments), copy.deepcopy(options)
        return getattr(module, function)(*copies, **named), copies, tuple(named.values())

    stock, ours = run_both(name, call)
    same(stock, ours, tolerance)
    return stock
