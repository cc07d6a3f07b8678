# SPDX-License-Identifier: Apache-2.0
"""Which kernels a start on CUDA would try for real models, and what the Hopper kernel launches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_specplug.kernels import FeatureKind, TreeAttnMetadata, cuda_dispatch
from vllm_specplug.kernels.cuda_contract import TOKEN_SCALE_BYTES, TOKEN_SCALE_CACHES
from vllm_specplug.kernels.cuda_dispatch import (
    CUDA_KERNELS,
    KernelShape,
    choose_cuda_kernel,
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
}
# Of heads that draft; every rank has all of them. Published shapes, and those of this repository.
DRAFTS = {
    "block head of Qwen3-8B": (32, 8, 128),
    "block head of Phi-3-mini": (32, 32, 96),
    "block head of SmolLM2": (9, 3, 64),
    "EAGLE-3 of Llama-3.3-70B": (64, 8, 128),
    "MTP of Qwen3.5": (16, 2, 256),
    "MTP of MiMo": (32, 8, 128),
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


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 784])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), RANKS)
def test_half_precision(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    """Pages of hybrid models are large and no power of two."""
    for dtype in (BF16, FP16):
        shape = KernelShape(head_dim, dtype, block_size, heads, kv_heads)
        hopper = {"cute"} if head_dim < 256 and block_size != 784 else set()
        assert served_by(shape) == {"flash", "triton", *hopper}
        assert served_by(shape, AMPERE) == {"flash", "triton"}


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), RANKS)
def test_float32_and_8_bit_caches_are_for_triton(heads: int, kv_heads: int, head_dim: int) -> None:
    assert served_by(KernelShape(head_dim, FP32, 16, heads, kv_heads)) == {"triton"}
    kinds = (FeatureKind(quantised_cache=True, quantised_query=True),)
    assert served_by(KernelShape(head_dim, BF16, 16, heads, kv_heads, kinds)) == {"triton"}
    assert served_by(KernelShape(head_dim, BF16, 16, heads, kv_heads, kinds), AMPERE) == set()


def quantisation(weights: str) -> Any:
    """vLLM's method for the caches of a checkpoint with fp8, or int8 (W8A8), weights."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    if weights == "fp8":
        return BaseKVCacheMethod(Fp8Config(is_checkpoint_fp8_serialized=True))
    from vllm.model_executor.layers.quantization.compressed_tensors import (
        compressed_tensors as compressed,
    )

    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    config = compressed.CompressedTensorsConfig.from_config(
        {"format": "int-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": group}}
    )
    return compressed.CompressedTensorsKVCacheMethod(config)


def layer_of_weights(
    weights: str, cache_dtype: str, *, quantises_queries: bool = False
) -> torch.nn.Module:
    """vLLM's attention layer as a checkpoint of quantised weights leaves it: with scales, whatever
    its cache is."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    layer.kv_cache_dtype, layer.calculate_kv_scales = cache_dtype, False
    method = quantisation(weights)
    method.create_weights(layer)
    for name in ("q_scale", "k_scale", "v_scale"):
        getattr(layer, name).data.fill_(0.25)
    method.process_weights_after_loading(layer)
    layer.query_quant = object() if quantises_queries else None
    return layer


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), RANKS)
def test_fp8_and_int8_weights(heads: int, kv_heads: int, head_dim: int) -> None:
    """They change no kernel: queries and caches are of the model's dtype, and scales that the
    checkpoint brings for a cache are not read. With an fp8 cache beside them only Triton serves."""
    pytest.importorskip("vllm")
    from vllm_specplug.vllm_attention.gpu import TreeFlashAttentionImpl, TreeTritonAttentionImpl

    for impl in (TreeFlashAttentionImpl, TreeTritonAttentionImpl):
        made = object.__new__(impl)
        for cache_dtype, quantised in (("auto", False), ("fp8", True), ("fp8_e4m3", True)):
            for asks in (False, quantised):
                layer = layer_of_weights("fp8", cache_dtype, quantises_queries=asks)
                made.kv_cache_dtype = cache_dtype
                features = made.tree_features(layer)
                assert features.kind == FeatureKind(quantised_cache=quantised, quantised_query=asks)
                assert not quantised or float(features.key_scales) == 0.25
                shape = KernelShape(head_dim, BF16, 16, heads, kv_heads, (features.kind,))
                hopper = {"cute"} if head_dim < 256 else set()
                plain = {"flash", "triton", *hopper}
                assert served_by(shape) == ({"triton"} if quantised else plain)
        # int8 goes with a cache of the model's dtype.
        made.kv_cache_dtype = "auto"
        assert made.tree_features(layer_of_weights("int8", "auto")).is_plain


@pytest.mark.parametrize("weights", ["int8", "fp8"])
@pytest.mark.parametrize("cache_dtype", TOKEN_SCALE_CACHES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), RANKS)
def test_caches_with_scales_of_each_token(
    heads: int, kv_heads: int, head_dim: int, cache_dtype: str, weights: str
) -> None:
    """Triton alone serves them, from vLLM's own views of their scales; int8 on compute capability
    8.0 as well, whose Triton does not know e4m3."""
    pytest.importorskip("vllm")
    from vllm_specplug.vllm_attention.gpu import TreeFlashAttentionImpl, TreeTritonAttentionImpl

    assert cache_dtype not in TreeFlashAttentionImpl.cache_dtypes
    assert cache_dtype in TreeTritonAttentionImpl.cache_dtypes
    layer = layer_of_weights(weights, cache_dtype)
    is_int8 = TOKEN_SCALE_CACHES[cache_dtype] == torch.int8
    # [num_blocks, Hkv, block_size, ...]
    size = (3, kv_heads, 16, 2 * (head_dim + TOKEN_SCALE_BYTES))
    layer.kv_cache = torch.zeros(size, dtype=torch.int8 if is_int8 else torch.uint8)
    made = object.__new__(TreeTritonAttentionImpl)
    made.kv_cache_dtype, made._k_scale_cache = cache_dtype, None
    features = made.tree_features(layer)
    assert features.kind == FeatureKind(quantised_cache=True, token_scales=True, int8_cache=is_int8)
    assert features.key_scales.shape == (3, 16, kv_heads)
    shape = KernelShape(head_dim, BF16, 16, heads, kv_heads, (features.kind,))
    assert served_by(shape) == {"triton"}
    assert served_by(shape, AMPERE) == ({"triton"} if is_int8 else set())


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), DRAFTS.values(), ids=list(DRAFTS))
def test_drafts(heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their caches are of the model's dtype whatever the target's are; FlashAttention, which takes
    the trees of a whole step alone, is not even tried."""
    tried: set[str] = set()
    timed: set[str] = set()

    def self_test(name: str, *rest: object) -> None:
        tried.add(name)

    def times(names: list[str], use: cuda_dispatch.KernelUse, device: torch.device) -> dict:
        assert use.for_drafts
        timed.update(names)
        return {name: float(rank) for rank, name in enumerate(reversed(names))}

    monkeypatch.setattr(cuda_dispatch, "self_test_failure", self_test)
    monkeypatch.setattr(cuda_dispatch, "kernel_times", times)
    for dtype in (BF16, FP16, FP32):
        for capability in (HOPPER, AMPERE):
            tried.clear()
            timed.clear()
            shape = KernelShape(head_dim, dtype, 16, heads, kv_heads)
            cpu = torch.device("cpu")
            chosen = choose_cuda_kernel("auto", shape, cpu, capability, for_drafts=True)
            hopper = {"cute"} if head_dim in (64, 96, 128) and dtype != FP32 else set()
            wanted = {"triton", *(hopper if capability == HOPPER else set())}
            assert tried == wanted and chosen.name == "triton"
            assert timed == (wanted if len(wanted) > 1 else set())
            assert wanted == served_by(shape, capability) - {"flash"}
            named = choose_cuda_kernel("flash", shape, cpu, capability, for_drafts=True)
            assert named.name == "triton"


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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [pytest.param(*d, id=n) for n, d in DRAFTS.items() if d[2] in (64, 96, 128)],
)
def test_what_the_hopper_kernel_launches_for_drafts_is_within_limits(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    """Blocks of 8 and 16 rows, and all that a deep tree expands."""
    for rows in (8, 16, 257):
        launched_within_limits(heads, kv_heads, head_dim, 16, rows - 1, for_drafts=True)
