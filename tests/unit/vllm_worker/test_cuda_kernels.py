# SPDX-License-Identifier: Apache-2.0
"""Set-up and buffers of the CUDA backend, on CPU tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel
from vllm_specplug.vllm_attention.gpu import gpu_cache_views
from vllm_specplug.vllm_worker.cuda_kernels import CudaKernels, StepLimits
from vllm_specplug.vllm_worker.memory.cache_groups import CacheGroup
from vllm_specplug.vllm_worker.memory.device_draft_cache import CudaDraftCache

CPU = torch.device("cpu")
LIMITS = StepLimits(num_requests=4, num_rows=64, tree_rows=5, context=512)
TABLE = torch.zeros(4, 8, dtype=torch.int32)


@pytest.fixture
def backend() -> CudaKernels:
    backend = CudaKernels("auto", 2, LIMITS, CPU)
    backend.kernel = ChosenKernel("cute", lambda *args: None, "")
    backend.views = gpu_cache_views
    return backend


def test_a_draft_of_another_kernel_than_the_targets_has_its_words(monkeypatch):
    """The target by CuTe, which makes words itself, and a head whose shape only Triton takes."""
    filled = []
    backend = CudaKernels("auto", 2, LIMITS, CPU)
    backend.kernel = ChosenKernel("cute", lambda *args: None, "")
    monkeypatch.setattr(
        backend,
        "fill_words",
        lambda meta, kernel=None: filled.append((kernel or backend.kernel).name),
    )
    monkeypatch.setattr(backend, "choose", lambda *args, **use: ChosenKernel("triton", print, ""))
    monkeypatch.setattr(backend, "cache_writer", lambda: None)
    spec = SimpleNamespace(window=None)
    layer = SimpleNamespace(kv_cache=torch.zeros(2, 1, 16, 8), spec=spec)
    layers: Any = [layer, layer]
    drafts = CudaDraftCache(backend, layers, lambda: TABLE, 1.0)
    one = torch.ones(1, dtype=torch.int32)
    requests = DeviceRequests(one.long(), one - 1, one, one, 1, 1, 0)
    rows = torch.zeros(3, 1, 4)
    for causal, expected in ((True, ["triton"]), (False, [])):
        filled.clear()
        attend = drafts.block_attention(requests, 3, causal)
        attend(0, rows, rows, rows)
        attend(1, rows, rows, rows)
        assert filled == expected


@pytest.mark.parametrize(("name", "full", "good"), [
    ("reference", "1", False), ("reference", "0", True), ("triton", "1", True),
])  # fmt: skip
def test_full_graphs_need_a_kernel_that_can_be_captured(backend, monkeypatch, name, full, good):
    """Else a graph would replay stock attention, which takes a tree for a line."""
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, full)
    monkeypatch.setattr(backend, "choose", lambda *args, **use: ChosenKernel(name, print, ""))
    groups = [CacheGroup(0, {"layer": torch.zeros(2, 1, 16, 8)})]
    if good:
        backend.bind(groups)
        assert backend.kernel.name == name
        return
    with pytest.raises(ValueError, match=f"{FULL_GRAPHS_VARIABLE}=1.*unset it"):
        backend.bind(groups)
