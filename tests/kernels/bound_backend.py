# SPDX-License-Identifier: Apache-2.0
"""The backend of CUDA on a CPU, with Triton's kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.device_trees import DeviceTrees
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel, load_kernel
from vllm_specplug.vllm_attention.tree_rows import DeviceTreeRows, attach_tree_rows
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.memory.cache_groups import target_groups


def triton_backend(
    heads: int, limits: StepLimits, monkeypatch: pytest.MonkeyPatch
) -> CudaTreeBackend:
    """One that writes nothing into the pages of a draft's layers."""
    kernel = ChosenKernel("triton", load_kernel("triton"), "")
    monkeypatch.setattr(CudaTreeBackend, "choose", lambda *args, **use: kernel)
    monkeypatch.setattr(CudaTreeBackend, "cache_writer", lambda self: lambda *args: None)
    return CudaTreeBackend("triton", heads, limits, torch.device("cpu"))


def bound(layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> CudaTreeBackend:
    """Over layers of vLLM's, of one group."""
    heads = next(iter(layers.values())).num_heads
    backend = triton_backend(heads, StepLimits(4, 64, 13, 400), monkeypatch)
    group = SimpleNamespace(layer_names=list(layers))
    backend.bind(target_groups(SimpleNamespace(kv_cache_groups=[group]), layers))
    return backend


def answer(made: DeviceTrees, layer: Any, backend: CudaTreeBackend) -> torch.Tensor:
    """What the layer gives for the rows of all trees."""
    output = torch.full(made.query.shape, float("nan"), dtype=made.dtype)
    metadata = SimpleNamespace(block_table=made.block_table)
    rows = DeviceTreeRows(made.metadata(), backend.kernel.run, backend.views, True)
    attach_tree_rows(metadata, rows)
    none: Any = None
    layer.impl.forward(layer, made.asked, none, none, layer.kv_cache, metadata, output)
    return output


def error(made: DeviceTrees, layer: Any, backend: CudaTreeBackend) -> float:
    """How far it is from the oracle."""
    rows = zip(made.tree_rows(answer(made, layer, backend)), made.expected(), strict=True)
    return max((found.double() - expected).abs().max().item() for found, expected in rows)
