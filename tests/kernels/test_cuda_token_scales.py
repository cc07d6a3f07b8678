# SPDX-License-Identifier: Apache-2.0
"""Caches in which each token and head has a scale of its own, from vLLM's layer to the kernel:
stored by vLLM's Triton kernel, read and moved by ours, all in Triton's interpreter."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm.v1.attention.backends import triton_attn

from tests.kernels.bound_backend import answer, bound, error
from tests.kernels.device_trees import DeviceTrees, other_scales
from tests.kernels.interpreted_vllm import interpreted_copy
from tests.kernels.spoilt_rows import (
    ATTEND_THEM,
    BAD_ROWS,
    TREES,
    check_rows,
    spoil,
)
from vllm_specplug.kernels import finite_values_triton
from vllm_specplug.kernels.cuda_contract import (
    TOKEN_SCALE_BYTES,
    TOKEN_SCALE_CACHES,
    numbers_and_scales,
)
from vllm_specplug.kernels.features import FeatureKind
from vllm_specplug.kernels.kv_compact_triton import LayerCaches, compact_paths_triton
from vllm_specplug.vllm_attention.gpu import TreeTritonAttentionImpl
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend

pytestmark = pytest.mark.usefixtures("interpreter", "stores")

CPU, INF, NAN = torch.device("cpu"), float("inf"), float("nan")
SPECS = [(0, 3), (37, 6)]
KINDS = pytest.mark.parametrize("cache_dtype", TOKEN_SCALE_CACHES)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's own store of such tokens; where vLLM found no Triton it has none."""
    path = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"
    name = "triton_reshape_and_cache_flash_per_token_head_quant"
    monkeypatch.setattr(triton_attn, name, getattr(interpreted_copy(path), name))
    with warnings.catch_warnings():
        # What it makes of NaN.
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


class Layer:
    """vLLM's attention layer over pages that it has filled itself with the tokens of some trees."""

    def __init__(self, made: DeviceTrees, cache_dtype: str) -> None:
        blocks, _, page, width = made.cache.shape
        self.num_heads, self.num_kv_heads = made.query.shape[1], made.cache.shape[1]
        self.head_size = width // 2
        self.dtype, self.kv_cache_dtype = made.dtype, cache_dtype
        self.made = made
        content = 2 * (self.head_size + TOKEN_SCALE_BYTES)
        # What nobody stored is NaN as e4m3 and as float32.
        shape = (blocks, page, self.num_kv_heads, content)
        stored = torch.int8 if cache_dtype.startswith("int8") else torch.uint8
        self.kv_cache = torch.full(shape, 255, dtype=torch.uint8).view(stored).transpose(1, 2)
        self.impl = TreeTritonAttentionImpl(
            self.num_heads, self.head_size, made.scale, self.num_kv_heads, None, None, cache_dtype
        )
        self.store(0)

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and scales of keys and of values, as they lie behind each other."""
        numbers = TOKEN_SCALE_CACHES[self.kv_cache_dtype]
        keys, values = self.kv_cache.view(numbers).transpose(1, 2).chunk(2, dim=-1)
        return keys, values

    def slots(self, r: int, positions: torch.Tensor) -> torch.Tensor:
        page = self.kv_cache.shape[2]
        return self.made.block_table[r + 1].long()[positions // page] * page + positions % page

    def store(self, from_row: int | None) -> None:
        """Stores the tokens of all trees; with their contexts unless `from_row` is given."""
        made = self.made
        for r, context in enumerate(made.contexts):
            first = 0 if from_row == 0 else context
            positions = torch.arange(first, len(made.keys[r]))
            key, value = made.keys[r][first:].clone(), made.values[r][first:].clone()
            # The last is padding.
            slots = torch.cat([self.slots(r, positions), torch.tensor([-1])])
            padding = torch.full_like(key[:1], NAN)
            key, value = torch.cat([key, padding]), torch.cat([value, padding])
            self.impl.do_kv_cache_update(self, key, value, self.kv_cache, slots)

    def read_back(self) -> None:
        """The oracle attends what is stored, which must be near what was to be."""
        for parts, half in zip((self.made.keys, self.made.values), self.halves, strict=True):
            numbers, scales = numbers_and_scales(half)
            for r, part in enumerate(parts):
                slots = self.slots(r, torch.arange(len(part)))
                at = slots // numbers.shape[1], slots % numbers.shape[1]
                of_slots = scales[at].unsqueeze(-1)
                read = numbers.float()[at] * of_slots
                # A step of int8. Of e4m3 a half: where it rounds up to a power of two, the
                # interpreter loses the carry.
                most = of_slots + 0.5 * part.abs() * numbers.is_floating_point()
                assert ((read - part).abs() <= most).all()
                part.copy_(read)


@KINDS
def test_tree_rows_read_what_vllm_stores(cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(DeviceTrees(SPECS, kv_heads=2), cache_dtype)
    backend = bound({"a": layer}, monkeypatch)
    kind = FeatureKind(
        quantised_cache=True, token_scales=True, int8_cache=cache_dtype.startswith("int8")
    )
    assert [s.features.kind for s in backend.samples] == [kind]
    assert backend.dtype == torch.float32 and backend.samples[0].keys.shape[3] == layer.head_size
    assert error(layer.made, layer, backend) > 1e-4, "nothing was rounded"
    layer.read_back()
    assert error(layer.made, layer, backend) <= 1e-5
    for name in ("_k_scale_cache", "_v_scale_cache"):
        held = getattr(layer.impl, name)
        for values in (1.0, held.nan_to_num(0.01).roll(1, 1)):
            with patch.object(layer.impl, name, other_scales(held, values)):
                assert error(layer.made, layer, backend) > 1e-3, name


@KINDS
def test_scales_move_with_their_tokens(cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(DeviceTrees(SPECS, kv_heads=2), cache_dtype)
    backend = bound({"a": layer}, monkeypatch)
    # Of each tree a path that skips nodes; -1 is not read.
    paths = torch.tensor([[1, 2, -1], [0, 3, 5]], dtype=torch.int32)
    lengths, requests = torch.tensor([2, 3]).int(), torch.tensor([1, 2]).int()
    contexts = torch.tensor(layer.made.contexts).int()
    before = layer.kv_cache.clone()
    expected = before.view(torch.uint8).clone()
    page = before.shape[2]
    for r, (path, length) in enumerate(zip(paths.tolist(), lengths.tolist(), strict=True)):
        for to, node in enumerate(path[:length]):
            source, target = layer.slots(r, contexts[r] + 1 + torch.tensor([node, to])).tolist()
            expected[target // page, :, target % page] = before.view(torch.uint8)[
                source // page, :, source % page
            ]
    moves = (paths, lengths, contexts, requests, layer.made.block_table)
    ((index, caches),) = backend.groups
    compact_paths_triton(caches, *moves)
    assert index == 0 and torch.equal(layer.kv_cache.view(torch.uint8), expected)
    # The control: numbers without what they are multiplied by.
    layer.kv_cache.copy_(before)
    compact_paths_triton(LayerCaches.of([backend.views(layer.kv_cache)]), *moves)
    assert not torch.equal(layer.kv_cache.view(torch.uint8), expected)


def spoilt(layer: Layer, backend: CudaTreeBackend, number: float) -> list[tuple[Any, Any]]:
    """Rows of each tree without and with two rows that hold `number`."""
    clean, made = answer(layer.made, layer, backend), layer.made
    for r, context in enumerate(made.contexts):
        for row in BAD_ROWS:
            spoil(made.keys[r][context:], made.values[r][context:], row, number)
    layer.store(None)
    now = answer(layer.made, layer, backend)
    return list(zip(made.tree_rows(clean), made.tree_rows(now), strict=True))


@KINDS
def test_what_is_not_finite_stays_in_its_branch(
    cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(DeviceTrees(TREES[:1], kv_heads=2), cache_dtype)
    for clean, now in spoilt(layer, bound({"a": layer}, monkeypatch), INF):
        check_rows(clean, now)


@KINDS
def test_nan_is_what_vllm_stores_of_it(cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store may make a finite number of one; other branches are as without it in any case."""
    layer = Layer(DeviceTrees(TREES[:1], kv_heads=2), cache_dtype)
    for clean, now in spoilt(layer, bound({"a": layer}, monkeypatch), NAN):
        others = [row for row in range(len(clean)) if row not in ATTEND_THEM]
        assert torch.equal(clean[others], now[others])
        assert not now[list(ATTEND_THEM), 0].isfinite().any()


@KINDS
def test_stored_as_they_are_they_reach_other_branches(
    cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite_values_triton, "isolate_token_scales_triton", lambda *a, **k: None)
    layer = Layer(DeviceTrees(TREES[:1], kv_heads=2), cache_dtype)
    (clean, now), *_ = spoilt(layer, bound({"a": layer}, monkeypatch), INF)
    with pytest.raises(AssertionError, match="sees a row of another branch"):
        check_rows(clean, now)
