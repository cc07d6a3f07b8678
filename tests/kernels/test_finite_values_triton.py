# SPDX-License-Identifier: Apache-2.0
"""Rows of other branches are as they are without what is not finite, in the device's kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.device_trees import FP16, FP32, DeviceTrees
from tests.kernels.spoilt_rows import TREES, as_it_is, check_spoilt
from vllm_specplug.kernels import AttnFeatures, isolate_nonfinite
from vllm_specplug.kernels.finite_values_triton import (
    isolate_nonfinite_triton,
    store_isolated_triton,
)

pytestmark = pytest.mark.usefixtures("interpreter")

NAN, INF = float("nan"), float("inf")


def stored_in_place(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    isolate_nonfinite_triton(key, value)
    return key, value


@pytest.mark.parametrize("features", [AttnFeatures(), AttnFeatures(window=30, soft_cap=2.0)])
@pytest.mark.parametrize("splits", [1, 2])
def test_in_the_triton_kernel(features: AttnFeatures, splits: int) -> None:
    problem = DeviceTrees(TREES, kv_heads=2, features=features)
    problem.check(splits=splits)
    check_spoilt(problem, stored_in_place, lambda: problem.answer(splits=splits))


def test_stored_as_they_are_they_reach_other_branches() -> None:
    problem = DeviceTrees(TREES, kv_heads=2)
    with pytest.raises(AssertionError, match="sees a row of another branch"):
        check_spoilt(problem, as_it_is, problem.answer)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_the_devices_kernel_stores_what_the_hosts_does(dtype: torch.dtype, number: float) -> None:
    draw = torch.Generator().manual_seed(0)
    for heads, head_dim in ((2, 16), (1, 24)):
        joint = torch.randn(37, 3 * heads * head_dim, generator=draw).to(dtype)
        _, key, value = joint.view(37, 3, heads, head_dim).unbind(1)
        value[[0, 20], 0, 5] = number
        value[36, -1] = number
        expected = isolate_nonfinite(key.clone(), value.clone())
        before = joint.clone()
        stored_in_place(key, value)
        for stored, wanted in zip((key, value), expected, strict=True):
            assert torch.equal(stored.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(joint.view(37, 3, -1)[:, 0], before.view(37, 3, -1)[:, 0])


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("number", [None, NAN, INF, -INF])
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (1, 24), (3, 128)])
def test_stored_at_once_as_by_two_kernels(
    dtype: torch.dtype, number: float | None, heads: int, head_dim: int
) -> None:
    draw, page = torch.Generator().manual_seed(0), 8
    # Rows of a joint product, and more of them than are stored.
    joint = torch.randn(40, 3 * heads * head_dim, generator=draw).to(dtype)
    _, key, value = joint.view(40, 3, heads, head_dim).unbind(1)
    if number is not None:
        value[[0, 20], 0, 5] = number
        value[36, -1] = number
    slots = torch.randperm(6 * page, generator=draw)[:37]
    slots[[3, 20]] = -1
    cache = torch.randn(6, heads, page, 2 * head_dim, generator=draw).to(dtype)
    wanted, before = cache.clone(), joint.clone()
    keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
    store_isolated_triton(key, value, keys, values, slots)
    assert torch.equal(joint.nan_to_num(7.0), before.nan_to_num(7.0))
    is_stored = slots >= 0
    at = slots[is_stored]
    k, v = (t[:37][is_stored] for t in isolate_nonfinite(key.clone(), value.clone()))
    wanted[at // page, :, at % page] = torch.cat((k, v), dim=-1)
    assert torch.equal(cache.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert values.isfinite().all() and keys.isnan().any() == (number is not None)
