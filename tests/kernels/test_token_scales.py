# SPDX-License-Identifier: Apache-2.0
"""Caches in which each token and head has a scale of its own, in Triton's interpreter: the tree
kernel, the readable reference, and what is stored of numbers that are not finite.

Slots that nobody owns hold NaN, their scales included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.device_trees import FP8, FP16, FP32, DeviceTrees, other_scales
from vllm_specplug.kernels import AttnFeatures
from vllm_specplug.kernels.cuda_contract import numbers_and_scales
from vllm_specplug.kernels.cuda_dispatch import (
    KernelShape,
    choose_cuda_kernel,
    load_kernel,
    self_test_error,
)
from vllm_specplug.kernels.features import FeatureKind
from vllm_specplug.kernels.finite_values_triton import isolate_token_scales_triton
from vllm_specplug.kernels.reference import tree_attn_cuda_reference

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("interpreter")

KINDS = pytest.mark.parametrize("kind", [torch.int8, FP8], ids=["int8", "e4m3"])
SPECS = [(0, 0), (31, 2), (39, 9), (100, 33)]
HEADS = torch.tensor([1.5, -2.0, 0.3, 0.8])
FEATURES = {
    "plain": AttnFeatures(),
    "window": AttnFeatures(window=40),
    "window of one": AttnFeatures(window=1),
    "soft cap": AttnFeatures(soft_cap=0.7),
    "sinks": AttnFeatures(sinks=HEADS),
    "alibi": AttnFeatures(alibi_slopes=HEADS.abs() / 10),
    "all": AttnFeatures(window=37, soft_cap=1.5, sinks=HEADS, alibi_slopes=HEADS.abs() / 10),
}


def problem(kind: torch.dtype, specs: list[tuple[int, int]], **options: Any) -> DeviceTrees:
    return DeviceTrees(specs, **{"kv_heads": 2, "token_scales": kind, **options})


@KINDS
@pytest.mark.parametrize("name", FEATURES)
def test_each_matches_branches_run_as_chains(kind: torch.dtype, name: str) -> None:
    problem(kind, SPECS, features=FEATURES[name]).check()
    problem(kind, [(300, 5), (3, 2), (0, 3)], features=FEATURES[name]).check(splits=2)


@KINDS
@pytest.mark.parametrize("page", [16, 64])
def test_half_precision_and_other_pages(kind: torch.dtype, page: int) -> None:
    """Not bfloat16: the interpreter makes bits of an integer that becomes one."""
    problem(kind, [(70, 9), (0, 12)], dtype=FP16, head_dim=24, page=page).check()
    problem(kind, [(130, 9)], dtype=FP16, head_dim=128, page=page).check(splits=1)


@KINDS
def test_dense_tails_are_not_quantised(kind: torch.dtype) -> None:
    problem(kind, [(0, 4), (45, 9)], dense=True, features=AttnFeatures(window=33)).check()


def _ones(scales: torch.Tensor) -> torch.Tensor:
    return other_scales(scales, 1.0)


def _of_the_token_before(scales: torch.Tensor) -> torch.Tensor:
    # NaN, in slots that nobody owns, would tell by itself.
    return other_scales(scales, scales.nan_to_num(0.01).roll(1, 1))


def _of_the_other_head(scales: torch.Tensor) -> torch.Tensor:
    return other_scales(scales, scales.flip(2))


@KINDS
@pytest.mark.parametrize("which", ["key_scales", "value_scales"])
@pytest.mark.parametrize("change", [_ones, _of_the_token_before, _of_the_other_head])
@pytest.mark.parametrize("splits", [1, 2])
def test_the_check_notices_other_scales(
    kind: torch.dtype, which: str, change: Callable[[torch.Tensor], torch.Tensor], splits: int
) -> None:
    """In the context, and of a tree alone."""
    for specs in ([(256, 0)], [(0, 15)]):
        made = problem(kind, specs)
        made.check(splits=splits)
        spoilt = {which: change(getattr(made.features, which))}
        with pytest.raises(AssertionError, match="off by"):
            made.check(splits=splits, features=replace(made.features, **spoilt))


@KINDS
@pytest.mark.parametrize("name", FEATURES)
def test_the_reference_reads_them(kind: torch.dtype, name: str) -> None:
    made = problem(kind, SPECS, features=FEATURES[name])

    def error(features: AttnFeatures) -> float:
        output = torch.zeros_like(made.query)
        tree_attn_cuda_reference(
            made.query, made.key_cache, made.value_cache, output, made.metadata(), made.scale,
            features=features,
        )  # fmt: skip
        return max(
            (output[start : start + n].double() - expected).abs().max().item()
            for start, n, expected in zip(made.starts, made.rows, made.expected(), strict=True)
        )

    assert error(made.features) < 1e-5
    for which in ("key_scales", "value_scales"):
        ones = _ones(getattr(made.features, which))
        # A row that sees itself alone has one weight, whatever its score.
        if (name, which) != ("window of one", "key_scales"):
            assert error(replace(made.features, **{which: ones})) > 1e-3, which


# -- what is stored of numbers that are not finite -------------------------------------------


@KINDS
def test_what_stays_of_a_token_that_is_not_finite(kind: torch.dtype) -> None:
    """An infinite scale of values, NaN among their numbers; padding has no slot."""
    made = problem(kind, [(40, 0)])
    key_scales, value_scales = made.features.key_scales, made.features.value_scales
    block, last = int(made.block_table[1, 0]), int(made.block_table[1, 2])
    bad = {(block, 3, 0): float("inf"), (block, 9, 1): float("nan"), (last, 2, 1): float("inf")}
    for at, number in bad.items():
        value_scales[at] = number
    expected = made.cache.clone()
    halves = expected.transpose(1, 2).chunk(2, dim=-1)
    (_, keys), (values, of_values) = map(numbers_and_scales, halves)
    for at in bad:
        keys[at], of_values[at] = float("nan"), 0.0
    if kind == FP8:
        # NaN of both signs.
        numbers = made.value_cache.view(torch.uint8)
        numbers[block, 12, 1, 5], numbers[block, 13, 1, 0] = 0x7F, 0xFF
        keys[block, 12:14, 1] = float("nan")
        values.view(torch.uint8)[block, 12, 1, 5] = values.view(torch.uint8)[block, 13, 1, 0] = 0
    slots = torch.tensor([*range(block * 16, block * 16 + 16), -1, last * 16 + 2, -1])
    isolate_token_scales_triton(
        made.value_cache, key_scales, value_scales, slots, floats=kind == FP8
    )
    # Another NaN than this one is no other.
    for found, wanted in zip((key_scales, value_scales), (keys, of_values), strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(made.value_cache.view(torch.uint8), values.view(torch.uint8))


# -- which kernel serves ---------------------------------------------------------------------


@pytest.mark.parametrize("int8", [True, False])
def test_the_self_test_is_of_such_a_cache(int8: bool) -> None:
    kind = FeatureKind(quantised_cache=True, token_scales=True, int8_cache=int8)
    shape = KernelShape(16, FP32, 16, 4, 2, (kind,))
    device = torch.device("cpu")
    assert choose_cuda_kernel("auto", shape, device, (9, 0)).name == "triton"

    def without(which: str) -> Callable[..., None]:
        def run(*args: Any, features: AttnFeatures, **more: Any) -> None:
            assert features.kind == shape.kinds[0]
            ones = {which: _ones(getattr(features, which))}
            load_kernel("triton")(*args, features=replace(features, **ones), **more)

        return run

    for which in ("key_scales", "value_scales"):
        error, limit = self_test_error(without(which), shape, device)
        assert error > 10 * limit, which
