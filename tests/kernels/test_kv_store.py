# SPDX-License-Identifier: Apache-2.0
"""Keys and values lie where the layout has them, and of a head that is not finite as
`isolate_nonfinite` would have stored it."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.paged import layout_of, num_threads, write_slots
from vllm_specplug.kernels import can_store_kv, isolate_nonfinite, probe_cpu_layout, store_kv
from vllm_specplug.kernels.cpu_layout import CpuKvLayout

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
BLOCKS, HEADS, BLOCK, DIM = 5, 3, 32, 32
LAYOUTS = [(FP32, "vec"), (FP16, "vec"), (BF16, "vec"), (BF16, "vnni"), (FP32, "table"),
           (FP16, "table")]  # fmt: skip


def joint(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [rows, HEADS, DIM], parts of the wider rows of one projection."""
    wide = torch.randn(rows, 4 * HEADS * DIM).to(dtype)
    _, _, key, value = (part.view(rows, HEADS, DIM) for part in wide.chunk(4, dim=1))
    return key, value


def stored(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, layout: CpuKvLayout):
    cache = torch.full((BLOCKS, HEADS, BLOCK, 2 * DIM), 7.0, dtype=key.dtype)
    assert can_store_kv(cache)
    store_kv(key, value, cache, slots, layout)
    return cache


def expected(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, layout: CpuKvLayout):
    cache = torch.full((BLOCKS, HEADS, BLOCK, 2 * DIM), 7.0, dtype=key.dtype)
    kept = slots[: len(key)] >= 0
    key, value = isolate_nonfinite(key[kept], value[kept])
    write_slots(layout, cache, slots[: len(kept)][kept], key, value)
    return cache


def check(cache: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.equal(cache.isnan(), other.isnan())
    assert torch.equal(cache.nan_to_num(nan=0.5), other.nan_to_num(nan=0.5))


@pytest.mark.parametrize(("dtype", "kind"), LAYOUTS)
@pytest.mark.parametrize("rows", [1, 2, 17, 150])
def test_every_layout(compiled: None, dtype: torch.dtype, kind: str, rows: int) -> None:
    layout = layout_of(kind, dtype, BLOCK, DIM)
    key, value = joint(rows, dtype)
    # As in a graph's padding there are more slots than tokens, and some tokens have none.
    slots = torch.randperm(BLOCKS * BLOCK)[: rows + 3]
    slots[1::5] = -1
    check(stored(key, value, slots, layout), expected(key, value, slots, layout))


@pytest.mark.parametrize(("dtype", "kind"), LAYOUTS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(compiled: None, dtype: torch.dtype, kind: str, number: float) -> None:
    layout = layout_of(kind, dtype, BLOCK, DIM)
    key, value = joint(9, dtype)
    value[2, 1, 0] = value[4, 0, DIM - 1] = value[4, 2, 7] = number
    # Keys are stored as they are: scores of rows that do not attend them are masked.
    key[5, 1, 3] = number
    value[6, 0, 0] = torch.finfo(dtype).max
    slots = torch.arange(9) + BLOCK - 4
    cache = stored(key, value, slots, layout)
    check(cache, expected(key, value, slots, layout))
    # Keys of three heads, and where it is none itself the one infinite number of a key.
    assert int(cache.isnan().sum()) == 3 * DIM + (number != number)
    assert int(cache.isinf().sum()) == (number == number)
    assert value[2, 1, 0] != 0 and not key[2, 1].isnan().any(), "the call's own are left alone"


def test_on_several_threads(compiled: None) -> None:
    layout = layout_of("vnni", BF16, 512, 128)
    key, value = torch.randn(2, 700, 2, 128).to(BF16)
    slots = torch.randperm(1024)[:700]
    caches = [torch.zeros(2, 2, 512, 256, dtype=BF16) for _ in range(2)]
    for threads, cache in zip((1, 4), caches, strict=True):
        with num_threads(threads):
            store_kv(key, value, cache, slots, layout)
    assert torch.equal(*caches) and caches[0].any()


@pytest.mark.parametrize("slot", [BLOCKS * BLOCK, 1 << 40])
def test_a_slot_outside_the_cache_is_refused(compiled: None, slot: int) -> None:
    key, value = joint(2, FP32)
    with pytest.raises(RuntimeError, match="is outside"):
        stored(key, value, torch.tensor([0, slot]), layout_of("vec", FP32, BLOCK, DIM))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_as_vllms_operator_writes(compiled: None, vllm_cpu_ops: None, dtype: torch.dtype) -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    size, dim = 64, 64
    isa = _get_attn_isa(dtype, size, dim)
    layout = probe_cpu_layout(isa, dtype, size, dim)
    key, value = torch.randn(2, 21, HEADS, dim).to(dtype)
    slots = torch.randperm(BLOCKS * size)[:21]
    slots[3] = -1
    caches = [torch.zeros(BLOCKS, HEADS, size, 2 * dim, dtype=dtype) for _ in range(2)]
    store_kv(key, value, caches[0], slots, layout)
    views = caches[1].view(BLOCKS, HEADS, 2 * size, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *views, slots, isa)
    assert torch.equal(*caches) and caches[0].any()
