# SPDX-License-Identifier: Apache-2.0
"""Matrix products in e4m3: their rounding, in Triton's interpreter, and their sums."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.kernels import row_ops
from vllm_specplug.kernels.fp8_linear import Fp8Linear
from vllm_specplug.kernels.row_ops_triton import round_rows_triton


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("rows", "size"), [(0, 16), (1, 1), (5, 70), (2, 1030)])
def test_the_kernel_rounds_as_torch_does(rows: int, size: int) -> None:
    torch.manual_seed(size)
    # Columns of a wider tensor, and rows of unlike magnitudes.
    x = torch.randn(rows, 2 * size)[:, size:] * 10.0 ** torch.arange(-3, rows - 3)[:, None]
    x[1:2] = 0.0
    rounded, scales = round_rows_triton(x.bfloat16())
    wanted, wanted_scales = row_ops.round_rows(x.bfloat16())
    torch.testing.assert_close(scales, wanted_scales)
    assert rounded.dtype == torch.float8_e4m3fn and rounded.is_contiguous()
    exact, wanted = x.bfloat16().float() / scales, wanted.float()
    # Triton's interpreter loses the carry of what is rounded up to a power of two.
    carries = (wanted.abs().log2() % 1 == 0) & (exact.abs() < wanted.abs())
    assert torch.equal(rounded.float()[~carries], wanted[~carries])
    # Three bits behind the point, below the smallest normal number multiples of 2^-9.
    assert bool(((wanted - exact).abs() <= exact.abs() / 16 + 2.0**-10).all())


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_near_the_exact_ones(has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 256).bfloat16(), torch.randn(2, 5, 256).bfloat16()
    bias = torch.randn(48).bfloat16() if has_bias else None
    product = Fp8Linear(weight, bias)
    wanted = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    got = product(x)
    assert got.shape == wanted.shape and got.dtype == torch.bfloat16
    assert float((got.float() - wanted).norm() / wanted.norm()) < 0.05
    assert product(x[:, :0]).shape == (2, 0, 48)


def test_another_weight_is_taken_in_place() -> None:
    old, new, x = (torch.randn(32, 64).bfloat16() for _ in range(3))
    product, other = Fp8Linear(old, None), Fp8Linear(new, None)
    weight, scales = product.weight, product.scales
    product.refill(new)
    assert product.weight is weight and product.scales is scales
    assert torch.equal(product(x), other(x))


@pytest.mark.parametrize(
    ("weight", "is_taken"),
    [
        (torch.zeros(16, 32).bfloat16(), True),
        (torch.zeros(8, 32).bfloat16(), False),
        (torch.zeros(16, 24).bfloat16(), False),
        (torch.zeros(16, 32), False),
    ],
)
def test_sizes_and_dtypes(weight: torch.Tensor, is_taken: bool) -> None:
    assert Fp8Linear.takes(weight) == is_taken
    if not is_taken:
        with pytest.raises(ValueError, match="no e4m3 products"):
            Fp8Linear(weight, None)
