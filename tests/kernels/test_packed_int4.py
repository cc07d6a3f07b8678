# SPDX-License-Identifier: Apache-2.0
"""Products with packed 4-bit weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conftest import use_isa
from vllm_specplug.kernels.extension import allowed_isas
from vllm_specplug.kernels.packed_linear import pack_int4, packed_int4_linear


@pytest.fixture(autouse=True, params=["avx512", "avx512_bf16"])
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param not in allowed_isas():
        pytest.skip(f"this CPU has no {request.param}")
    use_isa(request.param)
    yield
    use_isa(None)


# Blocks of rows change at 3, 7, 8, 13 and 15; more rows are split evenly, in parts of 512.
ROWS = (0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 15, 29, 40, 130, 515)
# (columns, depth, group size)
SHAPES = ((32, 32, 32), (33, 64, 8), (100, 576, 32), (64, 1024, 128), (130, 96, 96), (16, 48, 24))


def _case(
    columns: int, depth: int, group_size: int, has_zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Codes, scales, zero points, and the weight in float64."""
    torch.manual_seed(columns * depth)
    shape = (columns, depth // group_size)
    codes = torch.randint(0, 16, (columns, depth), dtype=torch.uint8)
    scales = (torch.rand(shape) / depth**0.5).bfloat16()
    zeros = torch.randint(-8, 8, shape).bfloat16() if has_zeros else None
    shift = 8.0 if zeros is None else 8.0 + zeros.double().repeat_interleave(group_size, 1)
    return codes, scales, zeros, (codes - shift) * scales.double().repeat_interleave(group_size, 1)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("columns", "depth", "group_size"), SHAPES)
def test_equals_exact_products_rounded_once(
    columns: int, depth: int, group_size: int, has_zeros: bool
) -> None:
    codes, scales, zeros, weight = _case(columns, depth, group_size, has_zeros)
    packed, bias = pack_int4(codes, scales, zeros), torch.randn(columns).bfloat16()
    for rows in ROWS:
        x = torch.randn(rows, depth).bfloat16()
        exact = x.double() @ weight.T
        for added in (None, bias):
            found = packed_int4_linear(x, packed, added)
            expected = exact if added is None else exact + added.double()
            error = (found.double() - expected).abs()
            assert bool((error <= expected.abs() * 2.0**-8 * 1.01 + 3e-5).all())


@pytest.mark.parametrize("has_zeros", [False, True])
def test_unit_vectors_read_the_weight(has_zeros: bool) -> None:
    codes, scales, zeros, weight = _case(100, 576, 32, has_zeros)
    packed = pack_int4(codes, scales, zeros)
    found = packed_int4_linear(torch.eye(576, dtype=torch.bfloat16), packed)
    assert torch.equal(found, weight.T.float().bfloat16())


def test_what_does_not_fit_is_refused() -> None:
    codes, scales, zeros, _ = _case(64, 64, 32, True)
    packed, x = pack_int4(codes, scales, zeros), torch.randn(2, 64).bfloat16()
    for wrong, message in (
        ((codes.int(), scales, zeros), "codes must be"),
        ((codes, scales.float(), zeros), "scales contiguous bfloat16"),
        ((codes, scales, zeros[:, :1].contiguous()), "zeros must be"),  # type: ignore[index]
        ((codes[:, :24].contiguous(), scales, zeros), "multiple of 8"),
        ((codes, scales.repeat(1, 2)[:, :3].contiguous(), None), "divide K"),
    ):
        with pytest.raises(RuntimeError, match=message):
            pack_int4(*wrong)
    with pytest.raises(RuntimeError, match="x must be bfloat16"):
        packed_int4_linear(x.float(), packed)
    with pytest.raises(RuntimeError, match=r"made of a weight \[64, 32\]"):
        packed_int4_linear(x[:, :32], packed)
    with pytest.raises(RuntimeError, match="bias must be"):
        packed_int4_linear(x, packed, torch.zeros(60).bfloat16())
    use_isa("avx2")
    try:
        with pytest.raises(RuntimeError, match="AVX-512"):
            packed_int4_linear(x, packed)
    finally:
        use_isa(None)
