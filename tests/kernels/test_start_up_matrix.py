# SPDX-License-Identifier: Apache-2.0
"""Which kernels a start on CUDA would try for real models, and what the Hopper kernel launches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from vllm_specplug.kernels import FeatureKind, TreeAttnMetadata
from vllm_specplug.kernels.cuda_dispatch import (
    CUDA_KERNELS,
    KernelShape,
    unsupported_by,
)
from vllm_specplug.kernels.cute.config import SHARED_LIMIT, ForwardConfig
from vllm_specplug.kernels.cute.launch import Launch, plan_launches

HOPPER, AMPERE = (9, 0), (8, 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Query heads, KV heads, head size.
MODELS = {
    "SmolLM2-135M": (9, 3, 64),
    "Qwen2.5-0.5B": (14, 2, 64),
    "Qwen3-8B": (32, 8, 128),
    "Llama-3.3-70B": (64, 8, 128),
    "Qwen3-30B-A3B": (32, 4, 128),
    "Phi-3-mini": (32, 32, 96),
    "Gemma-3-12B": (16, 8, 256),
    # MTP modules and window heads have such.
    "MTP of Qwen3.5": (16, 2, 256),
    "window head of Vicuna": (32, 32, 128),
}
# Of a driver: blocks of a grid's second and third dimension.
MOST_BLOCKS = 65535


def ranks() -> Iterator[tuple[str, int, int, int, int]]:
    """(model, tensor parallel ranks, heads, KV heads, head size); KV heads are never split."""
    for name, (heads, kv_heads, head_dim) in MODELS.items():
        for size in (1, 2, 4, 8):
            if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0):
                yield name, size, heads // size, max(1, kv_heads // size), head_dim


RANKS = [pytest.param(*rank[2:], id=f"{rank[0]} TP{rank[1]}") for rank in ranks()]


def served_by(shape: KernelShape, capability: tuple[int, int] = HOPPER) -> set[str]:
    serve = {name for name in CUDA_KERNELS if unsupported_by(name, shape, capability) is None}
    return serve - {"reference"}


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with cutlass, or with shipped kernels."""
    monkeypatch.setattr("vllm_specplug.kernels.cute.store.can_compile", lambda: True)


QUANTISED = FeatureKind(quantised_cache=True, quantised_query=True)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), RANKS)
def test_kernels_that_serve(heads: int, kv_heads: int, head_dim: int) -> None:
    for dtype, block_size in itertools.product((BF16, FP16), (16, 32, 64, 128, 784)):
        shape = KernelShape(head_dim, dtype, block_size, heads, kv_heads)
        # Pages of hybrid models are large and no power of two.
        hopper = {"cute"} if head_dim < 256 and block_size != 784 else set()
        assert served_by(shape) == {"flash", "triton", *hopper}
        assert served_by(shape, AMPERE) == {"flash", "triton"}
    assert served_by(KernelShape(head_dim, FP32, 16, heads, kv_heads)) == {"triton"}
    shape = KernelShape(head_dim, BF16, 16, heads, kv_heads, (QUANTISED,))
    assert served_by(shape) == {"triton"} and served_by(shape, AMPERE) == set()
    # Triton on compute capability 8.0 does not know e4m3.
    int8 = FeatureKind(quantised_cache=True, token_scales=True, int8_cache=True)
    assert served_by(replace(shape, kinds=(int8,)), AMPERE) == {"triton"}


def layer_of_fp8_weights(cache_dtype: str, quantises_queries: bool) -> torch.nn.Module:
    """vLLM's attention layer as a checkpoint of quantised weights leaves it: with scales, whatever
    its cache is."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    layer.kv_cache_dtype, layer.calculate_kv_scales = cache_dtype, False
    method = BaseKVCacheMethod(Fp8Config(is_checkpoint_fp8_serialized=True))
    method.create_weights(layer)
    for name in ("q_scale", "k_scale", "v_scale"):
        getattr(layer, name).data.fill_(0.25)
    method.process_weights_after_loading(layer)
    layer.query_quant = object() if quantises_queries else None
    return layer


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_e4m3"])
def test_scales_of_a_checkpoint_are_read_for_a_quantised_cache(cache_dtype: str) -> None:
    pytest.importorskip("vllm")
    from vllm_specplug.vllm_attention.gpu import TreeFlashAttentionImpl, TreeTritonAttentionImpl

    quantised = cache_dtype != "auto"
    for impl in (TreeFlashAttentionImpl, TreeTritonAttentionImpl):
        made = object.__new__(impl)
        made.kv_cache_dtype = cache_dtype
        for asks in {False, quantised}:
            features = made.tree_features(layer_of_fp8_weights(cache_dtype, asks))
            assert features.kind == FeatureKind(quantised_cache=quantised, quantised_query=asks)
            assert not quantised or float(features.key_scales) == 0.25


def launches(
    heads: int, kv_heads: int, head_dim: int, page: int, nodes: int, trees: int, context: int,
    for_drafts: bool = False,
) -> list[Launch]:  # fmt: skip
    """Of trees of one size, or of blocks of drafts, whose keys and values are in no cache; tensors
    that nobody reads have no memory."""
    rows = nodes + 1
    # A slice of a joined projection, as vLLM hands it over.
    joined = torch.empty(trees * rows, heads + 2 * kv_heads, head_dim, dtype=BF16)
    cache = torch.empty(4, page, kv_heads, 2 * head_dim, dtype=BF16)
    numbers = torch.zeros(5, trees, dtype=torch.int32)
    meta = TreeAttnMetadata(
        plan=numbers, parent_rows=numbers[0], block_table=torch.zeros(trees, 4, dtype=torch.int32),
        max_rows=rows, max_context=context, mask_kind="full" if for_drafts else "tree",
    )  # fmt: skip
    own = torch.empty(trees * rows, kv_heads, head_dim, dtype=BF16) if for_drafts else None

    def workspace(parts: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert parts * shape[0] * shape[1] * shape[2] * 4 < 2**30, "a gigabyte of partial results"
        return torch.empty(1), torch.empty(1), torch.empty(1)

    key, value = cache.split(head_dim, dim=-1)
    query = joined[:, :heads]
    return plan_launches(
        query, key, value, torch.empty(query.shape, dtype=BF16), meta, head_dim**-0.5, own, own,
        132, workspace,
    )  # fmt: skip


def launched_within_limits(
    heads: int, kv_heads: int, head_dim: int, page: int, nodes: int, **more: bool
) -> list[ForwardConfig]:
    """One tree of the longest context, and the largest batch."""
    found = []
    for trees, context in ((1, 131_072), (256, 4096)):
        forward, *merge = launches(heads, kv_heads, head_dim, page, nodes, trees, context, **more)
        blocks, of_heads, slots = forward.grid
        assert blocks * forward.config.tile_m >= (nodes + 1) * heads // kv_heads
        assert of_heads == kv_heads and trees <= slots <= MOST_BLOCKS
        assert forward.config.shared_bytes <= SHARED_LIMIT and forward.config.threads <= 1024
        assert all(launch.grid[1] == trees for launch in merge)
        found.append(forward.config)
    return found


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [p for p in RANKS if p.values[2] < 256])
def test_what_the_hopper_kernel_launches_is_within_limits(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    for page, nodes in itertools.product((16, 128), (0, 15, 63, 256)):
        # A tree of one warpgroup has none beside it that waits.
        alone = (nodes + 1) * heads // kv_heads <= 64
        for config in launched_within_limits(heads, kv_heads, head_dim, page, nodes):
            assert config.specialised != alone
    # Blocks of drafts, and all that a deep tree expands.
    for rows in (8, 16, 257):
        launched_within_limits(heads, kv_heads, head_dim, 16, rows - 1, for_drafts=True)
