# SPDX-License-Identifier: Apache-2.0
"""Which kernels a start on CUDA would try for real models, and what the Hopper kernel launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_specplug.kernels import FeatureKind, TreeAttnMetadata
from vllm_specplug.kernels.cuda_dispatch import CUDA_KERNELS, KernelShape, unsupported_by
from vllm_specplug.kernels.cute.config import SHARED_LIMIT
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


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 784])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), RANKS)
def test_half_precision(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    """Pages of hybrid models are large and no power of two."""
    for dtype in (BF16, FP16):
        shape = KernelShape(head_dim, dtype, block_size, heads, kv_heads)
        hopper = {"cute", "cute_ws"} if head_dim < 256 and block_size != 784 else set()
        assert served_by(shape) == {"flash", "triton", *hopper}
        assert served_by(shape, AMPERE) == {"flash", "triton"}


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), RANKS)
def test_float32_and_8_bit_caches_are_for_triton(heads: int, kv_heads: int, head_dim: int) -> None:
    assert served_by(KernelShape(head_dim, FP32, 16, heads, kv_heads)) == {"triton"}
    kinds = (FeatureKind(quantised_cache=True, quantised_query=True),)
    assert served_by(KernelShape(head_dim, BF16, 16, heads, kv_heads, kinds)) == {"triton"}
    assert served_by(KernelShape(head_dim, BF16, 16, heads, kv_heads, kinds), AMPERE) == set()


def layer_of_fp8_weights(cache_dtype: str, *, quantises_queries: bool) -> torch.nn.Module:
    """vLLM's attention layer as a checkpoint of fp8 weights leaves it: with scales, whatever its
    cache is."""
    pytest.importorskip("vllm")
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


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), RANKS)
def test_fp8_weights(heads: int, kv_heads: int, head_dim: int) -> None:
    """They change no kernel: queries and caches are of the model's dtype, and scales that the
    checkpoint brings for a cache are not read. With an fp8 cache beside them only Triton serves."""
    pytest.importorskip("vllm")
    from vllm_specplug.vllm_attention.gpu import TreeFlashAttentionImpl, TreeTritonAttentionImpl

    for impl in (TreeFlashAttentionImpl, TreeTritonAttentionImpl):
        made = object.__new__(impl)
        for cache_dtype, quantised in (("auto", False), ("fp8", True), ("fp8_e4m3", True)):
            for asks in (False, quantised):
                layer = layer_of_fp8_weights(cache_dtype, quantises_queries=asks)
                made.kv_cache_dtype = cache_dtype
                features = made.tree_features(layer)
                assert features.kind == FeatureKind(quantised_cache=quantised, quantised_query=asks)
                assert not quantised or float(features.key_scales) == 0.25
                shape = KernelShape(head_dim, BF16, 16, heads, kv_heads, (features.kind,))
                hopper = {"cute", "cute_ws"} if head_dim < 256 else set()
                plain = {"flash", "triton", *hopper}
                assert served_by(shape) == ({"triton"} if quantised else plain)


def launches(
    heads: int, kv_heads: int, head_dim: int, page: int, nodes: int, trees: int, context: int,
    specialised: bool,
) -> list[Launch]:  # fmt: skip
    """Of trees of one size; tensors that nobody reads have no memory."""
    rows = nodes + 1
    # A slice of a joined projection, as vLLM hands it over.
    joined = torch.empty(trees * rows, heads + 2 * kv_heads, head_dim, dtype=BF16)
    cache = torch.empty(4, page, kv_heads, 2 * head_dim, dtype=BF16)
    numbers = torch.zeros(5, trees, dtype=torch.int32)
    meta = TreeAttnMetadata(
        plan=numbers, parent_rows=numbers[0], block_table=torch.zeros(trees, 4, dtype=torch.int32),
        max_rows=rows, max_context=context,
    )  # fmt: skip

    def workspace(parts: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert parts * shape[0] * shape[1] * shape[2] * 4 < 2**30, "a gigabyte of partial results"
        return torch.empty(1), torch.empty(1), torch.empty(1)

    key, value = cache.split(head_dim, dim=-1)
    query = joined[:, :heads]
    return plan_launches(
        query, key, value, torch.empty(query.shape, dtype=BF16), meta, head_dim**-0.5, None, None,
        132, workspace, specialised=specialised,
    )  # fmt: skip


@pytest.mark.parametrize("specialised", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [p for p in RANKS if p.values[2] < 256])
def test_what_the_hopper_kernel_launches_is_within_limits(
    heads: int, kv_heads: int, head_dim: int, specialised: bool
) -> None:
    schemes = set()
    for page in (16, 128):
        for nodes in (0, 15, 63, 256):
            for trees, context in ((1, 131_072), (256, 4096)):
                forward, *merge = launches(
                    heads, kv_heads, head_dim, page, nodes, trees, context, specialised
                )
                blocks, of_heads, slots = forward.grid
                packed = (nodes + 1) * heads // kv_heads
                assert blocks * forward.config.tile_m >= packed
                assert of_heads == kv_heads and trees <= slots <= MOST_BLOCKS
                assert forward.config.shared_bytes <= SHARED_LIMIT
                assert forward.config.threads <= 1024
                # A tree of one warpgroup has none beside it that waits.
                schemes.add((packed <= 64, forward.config.specialised))
                for launch in merge:
                    assert launch.grid[1] == trees <= MOST_BLOCKS
    assert (True, True) not in schemes
    assert ((False, True) in schemes) == specialised
