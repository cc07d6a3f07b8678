# SPDX-License-Identifier: Apache-2.0
"""Matrix products of up to a dozen rows on a CPU, which are bound by reading the weight.

A verified tree is such a product. With few rows oneDNN reaches half of the rate of a CPU with
AVX-512 BF16, and reads all bytes of a weight: on one core, 12 rows in the layers of a model of 135M
parameters take 23.3 ms with oneDNN and 13.8 ms here, one row 20.9 and 8.1 ms. On a CPU without
bfloat16 arithmetic both widen the numbers, and here it is done in registers. On a CPU without
AVX-512 oneDNN has no bfloat16 products, and the time of torch's, which vLLM uses, is proportional
to the rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .extension import ISAS, allowed_isas, has_cpu_extension
from .huge_pages import in_huge_pages

# Narrower weights (the gate of a mixture of experts) are not worth a panel.
_FEWEST_COLUMNS = 32


def packs_target(products: str) -> bool:
    """Whether the weights of a target are packed here, by option `target_products`. "auto" packs
    them if packed products are the fastest known ones, unless vLLM has AMD's library with its own
    products."""
    if products == "auto":
        is_left = hasattr(torch.ops.zentorch, "zentorch_linear_unary")
        return has_packed_products() and not is_left
    return products == "packed" and packed_isa() is not None


def packed_isa() -> str | None:
    """Returns the instruction set of packed bfloat16 products here, "avx512_bf16", "avx512",
    "avx2" or None."""
    if not has_cpu_extension():
        return None
    isa = torch.ops.specplug.packed_isa()
    return None if isa < 0 else ISAS[isa]


def has_packed_products() -> bool:
    """Whether packed bfloat16 products are the fastest known ones on this CPU: without AMX, with
    which oneDNN is faster."""
    isa = packed_isa()
    return isa is not None and allowed_isas()[-1] == isa


def has_packed_int8_products() -> bool:
    """The same for packed int8 products: with AVX-512 VNNI, without AMX."""
    return has_packed_products() and _has_int8_products()


def _has_int8_products() -> bool:
    return bool(torch.ops.specplug.has_int8_products())


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `pack_linear` supports a weight."""
    return (
        weight.dim() == 2
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.shape[0] >= _FEWEST_COLUMNS
        and weight.shape[1] % 2 == 0
    )


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Returns a bfloat16 weight [N, K] in the order of `packed_linear`, in huge pages.

    With AVX-512 it is compressed without loss: uint8, about three quarters of the bytes. With
    AVX2 it is bfloat16 [ceil(N / 32), K / 2, 64], with zeros beyond N.

    Raises:
        RuntimeError: without the compiled kernels, or for a weight that `can_pack` declines.
    """
    _register_shapes()
    return in_huge_pages(torch.ops.specplug.pack_linear.default(weight.contiguous()))


def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, columns: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x [..., K] times a weight [N, K] of `pack_linear`, plus bias [N]: [..., N].

    Sums are float32 and rounded once, in an order that depends only on K, so a row's result does
    not depend on other rows.

    Args:
        columns: N.

    Raises:
        RuntimeError: on a CPU without AVX2, or if shapes or dtypes do not fit.
    """
    rows = _as_rows(x)
    out = torch.empty((rows.shape[0], columns), dtype=x.dtype)
    torch.ops.specplug.packed_linear.default(rows, packed, bias, out)
    return out.reshape(*x.shape[:-1], columns)


class PackedInt8(NamedTuple):
    """A weight [N, K] rounded to int8 by row, in the layout of `packed_int8_linear`."""

    weight: torch.Tensor
    """int8 [ceil(N / 32), ceil(K / 4), 128], zeros beyond N and K."""
    scales: torch.Tensor
    """float32 [N], divisor of a row."""
    sums: torch.Tensor
    """int32 [N], sum of a row's numbers."""


def pack_int8(rounded: torch.Tensor, scales: torch.Tensor) -> PackedInt8:
    """Packs a rounded weight int8 [N, K] with its scales float32 [N].

    Raises:
        RuntimeError: without the compiled kernels, or for another shape or dtype.
    """
    _register_shapes()
    sums = torch.empty(len(rounded), dtype=torch.int32)
    packed = torch.ops.specplug.pack_int8.default(rounded.contiguous(), sums)
    return PackedInt8(in_huge_pages(packed), scales, sums)


def packed_int8_linear(
    x: torch.Tensor, packed: PackedInt8, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x [..., K], bfloat16, times an int8 weight [N, K], plus bias [N]: [..., N]. A row of
    x is rounded to 127ths of its largest magnitude; sums are exact.

    Raises:
        RuntimeError: on a CPU without AVX-512 VNNI, or if shapes or dtypes do not fit.
    """
    rows, columns = _as_rows(x), len(packed.scales)
    out = torch.empty((rows.shape[0], columns), dtype=x.dtype)
    torch.ops.specplug.packed_int8_linear.default(
        rows, packed.weight, packed.sums, packed.scales, bias, out
    )
    return out.reshape(*x.shape[:-1], columns)


class PackedInt4(NamedTuple):
    """A weight [N, K] of 4-bit codes, in the layout of `packed_int4_linear`."""

    weight: torch.Tensor
    """uint8, as `csrc/cpu/int4_panels.h` describes."""
    columns: int
    """N."""
    group_size: int
    """Inputs that share a scale."""
    has_zeros: bool


def has_packed_int4_products() -> bool:
    """Whether this CPU supports packed 4-bit products: with AVX-512."""
    return packed_isa() in ("avx512", "avx512_bf16")


def pack_int4(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
) -> PackedInt4:
    """Packs the weight (codes - 8 - zeros) * scales.

    Args:
        codes: uint8 [N, K], from 0 to 15.
        scales: bfloat16 [N, groups], each for K / groups neighbouring inputs, a multiple of 8.
        zeros: bfloat16 [N, groups]; None is 0.

    Raises:
        RuntimeError: without the compiled kernels, or for another shape or dtype.
    """
    _register_shapes()
    packed = torch.ops.specplug.pack_int4.default(codes, scales, zeros)
    group_size = codes.shape[1] // scales.shape[1]
    return PackedInt4(in_huge_pages(packed), len(codes), group_size, zeros is not None)


def packed_int4_linear(
    x: torch.Tensor, packed: PackedInt4, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x [..., K], bfloat16, times a 4-bit weight [N, K], plus bias [N]: [..., N].

    A group's products with the codes are summed in float32 and then multiplied with its scale, so
    no weight is rounded. The order of sums depends only on K, so a row's result does not depend on
    other rows.

    Raises:
        RuntimeError: on a CPU without AVX-512, or if shapes or dtypes do not fit.
    """
    rows = _as_rows(x)
    out = torch.empty((rows.shape[0], packed.columns), dtype=x.dtype)
    torch.ops.specplug.packed_int4_linear.default(
        rows, packed.weight, packed.group_size, packed.has_zeros, bias, out
    )
    return out.reshape(*x.shape[:-1], packed.columns)


class PackedInt8Linear:
    """x [..., K] -> [..., N], bfloat16, for a weight [N, K] packed as int8 and bias [N] or None."""

    def __init__(self, packed: PackedInt8, bias: torch.Tensor | None) -> None:
        self.packed, self.bias = packed, bias
        # Arguments of kernels with several products.
        self.parts = [packed.weight, packed.sums, packed.scales]
        if bias is not None:
            self.parts.append(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return packed_int8_linear(x, self.packed, self.bias)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@functools.cache
def _register_shapes() -> None:
    if not has_cpu_extension():
        raise RuntimeError("packed products need the compiled CPU kernels")
    # torch.compile uses it for operators, which write `out` and return nothing.
    for operator in ("packed_linear", "packed_int8_linear", "packed_int4_linear"):
        torch.library.register_fake(f"specplug::{operator}", lambda *args: None)
