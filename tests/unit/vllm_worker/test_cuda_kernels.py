# SPDX-License-Identifier: Apache-2.0
"""Set-up and buffers of the CUDA backend, on CPU tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels import AttnFeatures, FeatureKind
from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel, KernelShape
from vllm_specplug.kernels.features import PLAIN
from vllm_specplug.vllm_attention.gpu import gpu_cache_views
from vllm_specplug.vllm_worker import cuda_kernels
from vllm_specplug.vllm_worker.cuda_kernels import (
    CudaKernels,
    LayerSample,
    StepLimits,
)
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


@pytest.mark.parametrize("tree_rows", [1, 9, 65, 257])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (7, 1)])
def test_warm_up_runs_every_variant_a_step_can_take(monkeypatch, tree_rows, heads, kv_heads):
    """Steps have trees of any size up to the largest; none may compile while serving."""
    pytest.importorskip("triton")
    from vllm_specplug.kernels import (
        finite_values_triton,
        kv_compact_triton,
        tree_builder_triton,
        tree_words_triton,
    )
    from vllm_specplug.kernels.tree_attn_triton import config_for, tail_config

    ran, words, built, moved, stored = set(), set(), [], [], []
    heap_size = tree_builder_triton._heap_size

    def configs(trees, rows):
        packed_rows = rows * heads // kv_heads
        config = config_for(CPU, packed_rows, 64, 2)
        return config, tail_config(config, CPU, trees, kv_heads, packed_rows)

    def attend(query, key_cache, value_cache, output, meta, scale):
        for config in configs(meta.num_trees, meta.max_rows):
            ran.add((config, meta.max_context > 0))

    def fill(plan, parent_rows, out, max_rows):
        words.add(out.shape[1])

    limits = StepLimits(4, 4 * tree_rows, tree_rows, 4096)
    backend = CudaKernels("auto", heads, limits, CPU)
    backend.kernel = ChosenKernel("triton", attend, "")
    backend.block_size = 16
    cache = torch.zeros(2, 16, kv_heads, 64, dtype=torch.bfloat16)
    backend.groups = [(0, kv_compact_triton.LayerCaches.of([(cache, cache)]))]
    backend.samples = [LayerSample(heads, PLAIN, cache, cache)]
    backend.dtype = cache.dtype
    monkeypatch.setattr(tree_words_triton, "fill_tree_words", fill)
    monkeypatch.setattr(
        kv_compact_triton, "compact_paths_triton", lambda *args: moved.append(args[2].tolist())
    )
    monkeypatch.setattr(
        tree_builder_triton,
        "build_best_first_triton",
        lambda *args: built.append(heap_size(args[-1])),
    )
    monkeypatch.setattr(
        finite_values_triton, "store_isolated_triton", lambda *kv: stored.append(kv[0].shape[1:])
    )
    waits = []
    backend.run_every_variant(lambda: waits.append(0))
    sizes = range(1, tree_rows + 1)
    wanted = {config for r in sizes for trees in range(1, 5) for config in configs(trees, r)}
    assert ran == {(config, long) for config in wanted for long in (False, True)}
    assert words == {-(-r // 64) for r in sizes}
    assert built == sorted({heap_size(r - 1) for r in sizes if r > 1})
    assert moved == [[0]] and len(waits) >= len(ran)
    assert stored == [(kv_heads, 64)]


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
    requests = DraftRequests(token_ids=[np.array([1])], context_lens=[0], req_indices=[0])
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
