# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a CPU whose cost is reading the weight, up to a dozen rows.

oneDNN's products of few rows reach half of what such a CPU computes and reads: with AVX-512 BF16 on
one core, 12 rows through the layers of a model of 135M parameters take 12.4 ms there and 6.5 here,
where one row takes 7.4 and 6.3. A verified tree is such a product.
"""

from __future__ import annotations

import functools

import torch

from .extension import has_cpu_extension, requested_isa, supported_isas

_ISA = "avx512_bf16"
# Narrower weights (the gate of a mixture of experts) are not worth a panel.
_FEWEST_COLUMNS = 32


def packs_target(products: str) -> bool:
    """Whether the weights of a target are packed here, by option `target_products`. "auto" packs
    them where there is AVX-512 BF16 and no AMX, whose tiles do more in oneDNN's products."""
    isas = supported_isas()
    if products == "auto":
        return requested_isa() in (None, _ISA) and isas[-1:] == (_ISA,)
    return products == "packed" and _ISA in isas


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `pack_linear` takes a weight."""
    return (
        weight.dim() == 2
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.shape[0] >= _FEWEST_COLUMNS
        and weight.shape[1] % 2 == 0
    )


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """The weight [N, K], bfloat16, in the order in which `packed_linear` reads it: bfloat16
    [ceil(N / 32), K / 2, 64], zeros beyond N.

    Raises:
        RuntimeError: without the compiled kernels, or for a weight that `can_pack` declines.
    """
    _register_shapes()
    return torch.ops.specplug.pack_linear.default(weight.contiguous())


def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, columns: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] times a weight [N, K] that `pack_linear` packed, plus bias [N]: [..., N].

    Sums are float32 and rounded once, in an order that depends on K alone: a row's result is the
    same whatever other rows are computed with it.

    Args:
        columns: N.

    Raises:
        RuntimeError: on a CPU without AVX-512 BF16, or where shapes or dtypes do not fit.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty((rows.shape[0], columns), dtype=x.dtype)
    torch.ops.specplug.packed_linear.default(rows, packed, bias, out)
    return out.reshape(*x.shape[:-1], columns)


@functools.cache
def _register_shapes() -> None:
    if not has_cpu_extension():
        raise RuntimeError("pack_linear needs the compiled CPU kernels")
    # torch.compile calls it in place of the operator, which writes `out` and returns nothing.
    torch.library.register_fake("specplug::packed_linear", lambda x, packed, bias, out: None)
