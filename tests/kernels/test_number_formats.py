# SPDX-License-Identifier: Apache-2.0
"""float16, and KV caches of 8 bits: every number is read as torch reads it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.paged import PagedTrees, layout_of, num_threads, paged_trees, write_slots
from vllm_specplug.kernels import AttnFeatures, probe_cpu_layout, tree_attn
from vllm_specplug.kernels.cpu_layout import FP8_CACHES, CpuKvLayout
from vllm_specplug.kernels.reference import copy_kv_reference, tree_attn_reference

FP16, E4M3, E5M2 = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
SMALL = pytest.mark.parametrize("small", [E4M3, E5M2])


def lone_rows(values: torch.Tensor, dtype: torch.dtype, **features: float) -> torch.Tensor:
    """Each row [Dh] of `values` as the one value that its query row attends, as the kernel
    returns it in `dtype`."""
    rows, size = values.shape
    block = -(-rows // 32) * 32
    layout = layout_of("vec", values.dtype, 32, size)
    cache = torch.zeros(block, 1, 32, 2 * size).to(values.dtype)
    keys, value_cache = layout.views(cache)
    view = value_cache.view(torch.uint8) if values.dtype.itemsize == 1 else value_cache
    source = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
    view.flatten(2)[:rows, 0, :size] = source
    problem = PagedTrees(layout_of("vec", dtype, 32, size), 1, 1, [(0, np.empty(0, np.int32))])
    meta = problem.metadata()
    plan = torch.zeros(5, rows, dtype=torch.int32)
    plan[0] = plan[1] = plan[4] = torch.arange(rows)
    plan[2] = 1
    meta = replace(
        meta, plan=plan, block_table=torch.arange(rows, dtype=torch.int32)[:, None],
        mask_words=torch.ones(rows, 1, dtype=torch.int64),
    )  # fmt: skip
    query, output = torch.zeros(rows, 1, size, dtype=dtype), torch.empty(rows, 1, size, dtype=dtype)
    tree_attn(
        query, keys, value_cache, output, meta, 1.0, layout, features=AttnFeatures(**features)
    )
    return output[:, 0]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal number for number, in float32 but for the rounding of a quotient; a sum that starts
    at zero has no -0."""
    rounding = 3e-7 if a.dtype == torch.float32 else 0.0
    return torch.allclose(a, b, rtol=rounding, atol=0.0, equal_nan=True)


def test_every_float16_comes_back(isa: str) -> None:
    """Also denormals; infinities and NaN last, where they spoil no other row."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(FP16).view(-1, 32)
    assert same(lone_rows(bits, FP16), bits)


def test_float16_is_rounded_as_torch_rounds(isa: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 32) * 2.0 ** torch.randint(-28, 18, (64, 32))
    values[0, :8] = torch.tensor([65519.9, 65520.0, -65504.0, 2.0**-24, 2.0**-25, 3e-8, -0.0, 1e9])
    halves = (values.half().float() + values.half().float().nextafter(torch.tensor(1e9))) / 2
    values[1:] = torch.where(values[1:].abs() < 6e4, halves[1:], values[1:])
    scale = 1.0 + 2.0**-11  # a product that float16 does not hold
    stored = values.half()
    expected = (stored.float() * scale).half()
    assert same(lone_rows(stored, FP16, value_scale=scale), expected)


@SMALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP16])
def test_every_number_of_eight_bits(isa: str, small: torch.dtype, dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(small).view(8, 32)
    expected = (numbers.float() * 0.75).to(dtype)
    assert same(lone_rows(numbers, dtype, value_scale=0.75), expected)


def small_problem(
    small: torch.dtype, dtype: torch.dtype, kind: str, features: AttnFeatures
) -> tuple[PagedTrees, CpuKvLayout, torch.Tensor]:
    """Trees over a cache of 8 bits, whose keys and values are what those bits stand for."""
    specs = [(0, 0), (31, 2), (33, 33), (70, 5)]
    problem = paged_trees(specs, (dtype, "vec"), head=64, group=3, features=features)
    layout = layout_of(kind, small, 32, 64)
    cache = torch.full(problem.cache.shape, 255, dtype=torch.uint8)  # NaN
    for r, (keys, values) in enumerate(zip(problem.keys, problem.values, strict=True)):
        rounded = (x.float().to(small).view(torch.uint8) for x in (keys, values))
        write_slots(layout, cache, problem.slots(r, len(keys)), *rounded)
        problem.keys[r] = keys.float().to(small).float()
        problem.values[r] = values.float().to(small).float()
    return problem, layout, cache


@SMALL
@pytest.mark.parametrize("run", [tree_attn, tree_attn_reference])
@pytest.mark.parametrize("kind", ["vec", "table"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP16])
def test_trees_over_eight_bits(isa, small, run, kind, dtype) -> None:
    """With scales, a window and a soft cap; a scale that is left out would show."""
    key_scale, value_scale = 0.4, 2.5
    features = AttnFeatures(window=40, soft_cap=3.0, key_scale=key_scale, value_scale=value_scale)
    problem, layout, cache = small_problem(small, dtype, kind, features)
    views = layout.views(cache)
    output = torch.zeros_like(problem.query)
    meta = problem.metadata()
    with num_threads(2):
        args = (problem.query, *views, output, meta, problem.scale, layout)
        run(*args, features=features)
    problem.scale *= key_scale
    expected = torch.cat(problem.expected()) * value_scale
    error = (torch.cat(problem.tree_rows(output)).double() - expected).abs().max()
    limit = 3 * torch.finfo(dtype).eps * float(expected.abs().max())
    assert error <= limit, (float(error), limit)
    problem.scale /= key_scale
    unscaled = (torch.cat(problem.expected()) * value_scale - expected).abs().max()
    assert unscaled > 5 * limit


@SMALL
def test_eight_bits_move_as_they_are(isa: str, small: torch.dtype) -> None:
    from vllm_specplug.kernels import copy_kv

    layout = layout_of("table", small, 32, 64)
    cache = torch.randint(0, 256, (3, 2, 32, 128), dtype=torch.uint8)
    moved, expected = [cache.clone()], [cache.clone()]
    slots = torch.tensor([[[35, 37, 70]]]), torch.tensor([30, 35, 36])
    copy_kv(moved, moved, *slots, layout)
    copy_kv_reference(expected, expected, *slots, layout)
    assert torch.equal(moved[0], expected[0]) and not torch.equal(moved[0], cache)


@pytest.mark.usefixtures("vllm_cpu_ops")
@pytest.mark.parametrize("name", FP8_CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP16])
def test_vllm_writes_what_is_read_back(name: str, dtype: torch.dtype) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM writes caches of 8 bits with AVX-512")
    small = FP8_CACHES[name]
    layout = probe_cpu_layout("vec", small, 32, 64, dtype)
    cache = torch.zeros(4, 3, 32, 128, dtype=torch.uint8)
    # Numbers that the cache holds: it cuts others off, where torch rounds.
    kept = torch.randn(2, 50, 3, 64).to(small).float()
    key, value = (kept * torch.tensor([0.5, 2.0]).view(2, 1, 1, 1)).to(dtype)
    slots = torch.randperm(128)[:50]
    halves = cache.view(4, 3, 64, 64).chunk(2, dim=2)
    torch.ops._C.cpu_attn_reshape_and_cache(key, value, *halves, slots, "vec", 0.5, 2.0, name)
    k, v = layout.gather(*layout.views(cache), slots)
    assert torch.equal(k, kept[0]) and torch.equal(v, kept[1])
