# SPDX-License-Identifier: Apache-2.0
"""What the checked interpreter does not let pass."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.usefixtures("interpreter")


@triton.jit
def _copy_kernel(source, target, count, first, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + first + at, tl.load(source + at, mask=at < count))


@triton.jit
def _product_kernel(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    square = at[:, None] * SIZE + at[None, :]
    tl.store(out + square, tl.dot(tl.load(a + square), tl.load(b + square)))


@pytest.mark.parametrize(("count", "first"), [(5, 0), (4, 1), (4, -1)])
def test_an_access_outside_the_tensors_of_a_launch(count: int, first: int) -> None:
    whole = torch.zeros(32)
    source, target = whole[:4].clone(), whole[:8].clone()
    with pytest.raises(Exception, match="outside the tensors"):
        _copy_kernel[(1,)](source, target, count, first, BLOCK=8)


def test_what_is_not_loaded_or_not_filled_is_nan() -> None:
    target = torch.zeros(8)
    _copy_kernel[(1,)](torch.ones(4), target, 4, 0, BLOCK=8)
    assert target[:4].tolist() == [1.0] * 4 and target[4:].isnan().all()
    numbers = torch.zeros(8, dtype=torch.int32)
    _copy_kernel[(1,)](numbers[:4].clone(), numbers, 4, 0, BLOCK=8)
    assert numbers.tolist() == [0] * 4 + [-1] * 4
    assert torch.empty(3).isnan().all() and torch.empty(3, dtype=torch.bfloat16).isnan().all()


def test_products_of_bfloat16() -> None:
    a, b = torch.randn(2, 16, 16).bfloat16()
    out = torch.zeros(16, 16)
    _product_kernel[(1,)](a, b, out, SIZE=16)
    assert torch.allclose(out, a.float() @ b.float(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_numbers_are_rounded_to_bfloat16(dtype: torch.dtype) -> None:
    numbers = (37 * torch.randn(8)).to(dtype)
    target = torch.zeros(8, dtype=torch.bfloat16)
    _copy_kernel[(1,)](numbers, target, 8, 0, BLOCK=8)
    assert torch.equal(target, numbers.bfloat16())
