# SPDX-License-Identifier: Apache-2.0
"""Set-up and buffers of the CUDA backend, on CPU tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.kernels import AttnFeatures, FeatureKind
from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel, KernelShape
from vllm_specplug.vllm_attention.gpu import gpu_cache_views
from vllm_specplug.vllm_worker import cuda_kernels
from vllm_specplug.vllm_worker.cuda_kernels import (
    CudaKernels,
    StepLimits,
)
from vllm_specplug.vllm_worker.memory.cache_groups import CacheGroup
from vllm_specplug.vllm_worker.memory.device_draft_cache import CudaDraftCache
from vllm_specplug.vllm_worker.ranks import slowest_rank_values

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


def test_the_server_logs_which_kernel_serves_and_why(backend, monkeypatch):
    lines = []
    monkeypatch.setattr(cuda_kernels.logger, "info", lambda text, *more: lines.append(text % more))
    reasons = iter(["fastest of flash 9 us, triton 12 us", "the only one that runs"])
    monkeypatch.setattr(
        backend, "choose", lambda shape: ChosenKernel("flash", print, next(reasons))
    )
    backend.bind([CacheGroup(0, {"layer": torch.zeros(2, 1, 16, 8)})])
    assert lines == ["Tree attention: flash kernel (fastest of flash 9 us, triton 12 us)"]
    # Layers of two shapes: which of them has which.
    reasons = iter(["requested", "the only one that runs"])
    narrow, wide = torch.zeros(2, 1, 16, 8), torch.zeros(2, 1, 16, 16)
    backend.bind([CacheGroup(0, {"narrow": narrow}), CacheGroup(1, {"wide": wide})])
    assert lines[1] == (
        "Tree attention: flash kernel (2 heads over 1 of 4: flash, requested; "
        "2 heads over 1 of 8: flash, the only one that runs)"
    )


def test_a_quantised_cache_takes_a_kernel_for_the_models_dtype(monkeypatch):
    pytest.importorskip("triton")
    scale = torch.tensor(0.5)
    features = AttnFeatures(key_scales=scale, value_scales=scale, query_scales=scale)
    backend = CudaKernels("auto", 2, LIMITS, CPU)
    chosen = []

    def choose(requested, shape, *rest, **use):
        # The slowest rank decides.
        assert slowest_rank_values in rest
        chosen.append((shape.dtype, shape.kinds))
        return ChosenKernel("triton", print, "")

    monkeypatch.setattr(cuda_kernels, "choose_cuda_kernel", choose)
    monkeypatch.setattr(CudaKernels, "capability", lambda self: (9, 0))
    cache = torch.zeros(2, 1, 16, 8, dtype=torch.uint8)
    backend.bind([CacheGroup(0, {"a": cache}, torch.float16, "fp8", {"a": features})])
    kind = FeatureKind(quantised_cache=True, quantised_query=True)
    assert chosen == [(torch.float16, (kind,))]
    assert backend.views(cache)[0].dtype == torch.float8_e4m3fn
    assert backend.views(cache)[0].data_ptr() == cache.data_ptr()
    # A head's caches keep the model's dtype, and its kernel is one for plain layers.
    backend.choose(KernelShape.of((2, 1, 64, 16), torch.float16), for_drafts=True)
    assert chosen[1] == (torch.float16, (FeatureKind(),))
