# SPDX-License-Identifier: Apache-2.0
"""The quick interpreter beside Triton's own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs

from tests.quick_interpreter import quick_interpreter


@triton.jit
def _half(block):
    return (block * 0.5).to(tl.float16)


@triton.jit
def _mixed_kernel(numbers, values, found, hashes, sums, count, SIZE: tl.constexpr):
    """Masks, broadcasts, sums, products of two kinds of integers that wrap, casts, a branch, a
    loop, reductions, and a call."""
    at = tl.arange(0, SIZE)
    inside = at < count
    number = tl.load(numbers + at, mask=inside, other=-3)
    value = tl.load(values + at, mask=inside, other=0.0)
    grid = number[:, None] * (at[None, :] + tl.program_id(0)) - number[None, :]
    hashed = number.to(tl.uint32) * 2654435761
    for shift in range(3):
        hashed ^= (hashed >> (shift + 5)) + grid.to(tl.uint32).max(1)
    if tl.program_id(0) > 0:
        value = tl.exp(value) + _half(value)
    scaled = tl.where(grid > 0, value[:, None], grid / 7)
    tl.store(hashes + tl.program_id(0) * SIZE + at, hashed.to(tl.int32, bitcast=True))
    tl.store(found + tl.program_id(0) * SIZE + at, tl.argmax(scaled, axis=1), mask=inside)
    tl.store(sums + tl.program_id(0) * SIZE + at, tl.sum(scaled, axis=0) - tl.cumsum(value))


def test_numbers_are_those_of_the_stock_interpreter() -> None:
    if not knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is off")
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**31), 2**31 - 1, (16,), dtype=torch.int32, generator=generator)
    values = torch.randn(16, generator=generator)

    def run() -> list[torch.Tensor]:
        out = [torch.full((2, 16), -1, dtype=torch.int32) for _ in range(2)]
        out.append(torch.zeros(2, 16))
        _mixed_kernel[(2,)](numbers, values, *out, 13, SIZE=16)
        return [part.view(torch.int32) for part in out]

    expected = run()
    with quick_interpreter():
        quick = run()
    assert all(map(torch.equal, quick, expected))
    assert all(len(part.unique()) > 2 for part in expected)
    assert all(map(torch.equal, run(), expected)), "it is not undone"
