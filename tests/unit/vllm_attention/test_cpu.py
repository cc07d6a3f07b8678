# SPDX-License-Identifier: Apache-2.0
"""What a layer on a CPU keeps between steps, and what it must not keep."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")

from vllm_specplug.kernels import tree_metadata  # noqa: E402
from vllm_specplug.vllm_attention.cpu import TreeCPUAttentionBackendImpl, cpu_kv_layout  # noqa: E402
from vllm_specplug.vllm_attention.tree_rows import (  # noqa: E402
    CpuTreeRows,
    attach_tree_rows,
    layout_key,
    warmup_rows,
)

HEADS, DIM, BLOCK = 2, 32, 32


@pytest.fixture
def impl() -> Any:
    platforms = pytest.importorskip("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        pytest.skip("needs a CPU build of vLLM")
    platforms.current_platform.import_kernels()
    made: Any = object.__new__(TreeCPUAttentionBackendImpl)
    made.scale, made.kv_cache_dtype, made.attn_type = DIM**-0.5, "auto", "decoder"
    made.sliding_window, made.logits_soft_cap = -1, 0
    made.sinks = made.alibi_slopes = made.kv_sharing_target_layer_name = None
    return made


def step(impl: Any, cache: torch.Tensor, layers: dict[Any, Any]) -> torch.Tensor:
    """The output of a root alone, on an empty context, whose value is 3."""
    query = torch.ones(1, HEADS, DIM)
    layer = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)
    table = torch.zeros(1, 1, dtype=torch.int32)
    metadata = tree_metadata([0], [0], [0], [torch.empty(0).int().numpy()], table)
    rows = CpuTreeRows(metadata, {layout_key(cache): cpu_kv_layout(cache)}, True, layers)
    slots = torch.zeros(1, dtype=torch.long)
    attn_metadata = SimpleNamespace(block_table=table, slot_mapping=slots)
    attach_tree_rows(attn_metadata, rows)
    output = torch.zeros_like(query)
    return impl.forward(layer, query, query, 3 * query, cache, attn_metadata, output)


def test_another_cache_takes_the_place_of_the_first(impl: Any) -> None:
    layers: dict[Any, Any] = {}
    caches = [torch.full((1, HEADS, BLOCK, 2 * DIM), 9.0) for _ in range(2)]
    for cache in (*caches, caches[0]):
        cache.fill_(9.0)
        assert torch.equal(step(impl, cache, layers), torch.full((1, HEADS, DIM), 3.0))
        assert layers[impl].kv_cache is cache
        assert int((cache != 9.0).sum()) == 2 * HEADS * DIM


def test_a_cache_ends_before_its_layer(impl: Any) -> None:
    cache = torch.zeros(1, HEADS, BLOCK, 2 * DIM)
    layers: dict[Any, Any] = {}
    step(impl, cache, layers)
    kept = weakref.ref(cache)
    # As when the runner ends, which the layers outlive.
    layers.clear()
    del cache
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("num_rows", "tree_rows", "longest", "counts", "contexts"),
    [
        (7, 3, 10, [3, 3, 1], [7, 7, 9]),
        (2, 33, 64, [2], [62]),
        # No tree is longer than the dummies that its block table has room for.
        (5, 33, 4, [4, 1], [0, 3]),
    ],
)
def test_rows_of_dummies_are_chains_behind_their_context(
    num_rows: int, tree_rows: int, longest: int, counts: list[int], contexts: list[int]
) -> None:
    made = warmup_rows(num_rows, tree_rows, longest, torch.zeros(2, 4, dtype=torch.int32))
    requests, starts, rows, before, _ = made.plan.tolist()
    assert (rows, before) == (counts, contexts)
    assert requests == [i % 2 for i in range(len(counts))]
    assert starts == [sum(counts[:i]) for i in range(len(counts))]
    assert made.mask_words is not None
    places = [i for count in counts for i in range(count)]
    assert made.mask_words[:, 0].tolist() == [2 ** (place + 1) - 1 for place in places]
