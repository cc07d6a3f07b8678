# SPDX-License-Identifier: Apache-2.0
"""Features and 8-bit caches in the Triton kernel, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.attention_suite import FEATURES, HEADS, FeatureSuite, Specs
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

KV_HEADS = 2
# Scales that are no powers of two, and one per tensor or KV head.
CACHE: dict[str, Any] = {"key_scales": torch.tensor(0.37), "value_scales": torch.tensor([1.3])}
BY_HEAD = {"key_scales": torch.tensor([0.11, 0.7]), "value_scales": torch.tensor([1.9, 0.6])}
QUERY = {"query_scales": torch.tensor(0.3)}
SMALL_WINDOW = replace(FEATURES["all"], window=37)


def problem(
    features: AttnFeatures, specs: Specs, kind: torch.dtype | None = None, **options: Any
) -> DeviceTrees:
    """`kind`: int8 or e4m3, of a cache with scales of each token and head."""
    sizes = {"kv_heads": KV_HEADS, "group": HEADS // KV_HEADS, "token_scales": kind}
    return DeviceTrees(specs, features=features, **{**sizes, **options})


class TestFeatures(FeatureSuite):
    def problem(self, features: AttnFeatures, specs: Specs, **options: Any) -> DeviceTrees:
        return problem(features, specs, **options)


CACHES = {
    "cache": (AttnFeatures(**CACHE), None),
    "cache by head": (AttnFeatures(**BY_HEAD), None),
    "cache and query": (AttnFeatures(**BY_HEAD, query_scales=torch.tensor([0.3, 0.05])), None),
    "all": (replace(SMALL_WINDOW, **CACHE, **QUERY), None),
    "int8": (AttnFeatures(), torch.int8),
    "e4m3": (AttnFeatures(), FP8),
    "all, int8": (SMALL_WINDOW, torch.int8),
    "all, e4m3": (SMALL_WINDOW, FP8),
}


@pytest.mark.parametrize(("features", "kind"), CACHES.values(), ids=list(CACHES))
def test_caches_of_eight_bits(features: AttnFeatures, kind: torch.dtype | None) -> None:
    """Not bfloat16: the interpreter makes bits of an integer that becomes one."""
    problem(features, [(0, 0), (31, 2), (39, 9), (100, 33)], kind).check()
    problem(features, [(300, 5), (3, 2), (0, 3)], kind).check(splits=2)
    problem(features, [(70, 9), (0, 12)], kind, dtype=FP16, head_dim=24, page=64).check()
    # The tree's own keys and values are not quantised.
    problem(features, [(0, 4), (45, 9)], kind, dense=True).check()


@pytest.mark.parametrize("name", ["all", "wide soft cap"])
def test_half_precision(name: str) -> None:
    problem(FEATURES[name], [(33, 9), (0, 12)], dtype=FP16, head_dim=24).check()


@pytest.mark.parametrize("change", [
    {"key_scales": torch.tensor(1.0)}, {"value_scales": torch.tensor(1.0)}, {"query_scales": None},
])  # fmt: skip
def test_the_check_notices_scales_left_out(change: dict[str, Any]) -> None:
    made = problem(AttnFeatures(**CACHE, **QUERY), [(30, 12), (70, 12)])
    made.check()
    with pytest.raises(AssertionError, match="off by"):
        made.check(features=replace(made.features, **change))


def _of_the_token_before(scales: torch.Tensor) -> torch.Tensor:
    # Unowned slots hold NaN, which would fail for another reason.
    return scales.nan_to_num(0.01).roll(1, 1)


def _of_the_other_head(scales: torch.Tensor) -> torch.Tensor:
    return scales.flip(2)


@pytest.mark.parametrize("specs", [[(256, 0)], [(0, 15)]], ids=["context", "tree"])
@pytest.mark.parametrize("change", [torch.ones_like, _of_the_token_before, _of_the_other_head])
def test_the_check_notices_other_scales_of_tokens(
    change: Callable[[torch.Tensor], torch.Tensor], specs: Specs
) -> None:
    made = problem(AttnFeatures(), specs, torch.int8)
    made.check(splits=2)
    for which in ("key_scales", "value_scales"):
        scales = getattr(made.features, which)
        spoilt = replace(made.features, **{which: other_scales(scales, change(scales))})
        with pytest.raises(AssertionError, match="off by"):
            made.check(splits=2, features=spoilt)


@pytest.mark.parametrize("kind", [torch.int8, FP8])
def test_the_reference_reads_scales_of_tokens(kind: torch.dtype) -> None:
    made = problem(SMALL_WINDOW, [(0, 0), (31, 2), (39, 9), (100, 33)], kind)
    made.check(kernel=tree_attn_cuda_reference)


# -- what is stored of numbers that are not finite -------------------------------------------


@pytest.mark.parametrize("kind", [torch.int8, FP8])
def test_what_stays_of_a_token_that_is_not_finite(kind: torch.dtype) -> None:
    """An infinite scale of values, NaN among their numbers; padding has no slot."""
    made = problem(AttnFeatures(), [(40, 0)], kind)
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
            ones = {which: other_scales(getattr(features, which), 1.0)}
            load_kernel("triton")(*args, features=replace(features, **ones), **more)

        return run

    for which in ("key_scales", "value_scales"):
        error, limit = self_test_error(without(which), shape, device)
        assert error > 10 * limit, which
