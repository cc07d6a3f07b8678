# SPDX-License-Identifier: Apache-2.0
"""Matrix products in e4m3 on a GPU: half the bytes of bfloat16, and twice its rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .row_ops import round_rows

FP8_CAPABILITY = (9, 0)
"""The lowest capability with e4m3 products and a scale per row."""
# Sizes of the product's matrices are multiples of this.
_STEP = 16
TORCH_PRODUCT = partial(torch._scaled_mm, use_fast_accum=True)


class Fp8Linear:
    """x [..., in] bfloat16 -> [..., out] for weight [out, in].

    Each row of the weight and of x is divided by its largest magnitude / 448 and rounded to e4m3.

    Args:
        multiply: called with both matrices, `scale_a`, `scale_b`, `bias` and `out_dtype`.

    Raises:
        ValueError: if `takes` refuses the weight.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        multiply: Callable[..., torch.Tensor] = TORCH_PRODUCT,
    ) -> None:
        if not self.takes(weight):
            raise ValueError(f"no e4m3 products with a weight {tuple(weight.shape)}")
        self.weight, self.scales = round_rows(weight)
        self.bias, self.multiply = bias, multiply

    def refill(self, weight: torch.Tensor) -> None:
        """Loads another weight of this shape in place, because CUDA graphs read this memory."""
        rounded, scales = round_rows(weight)
        self.weight.copy_(rounded)
        self.scales.copy_(scales)

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Whether a product with this weight is supported."""
        sizes_fit = all(size % _STEP == 0 for size in weight.shape)
        return sizes_fit and weight.dtype == torch.bfloat16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            # Kernels need not support products without rows.
            return x.new_empty(*x.shape[:-1], len(self.weight))
        rows, scales = round_rows(x.reshape(-1, x.shape[-1]))
        out = self.multiply(
            rows, self.weight.t(), scale_a=scales, scale_b=self.scales.t(), out_dtype=x.dtype,
            bias=self.bias,
        )  # fmt: skip
        return out.unflatten(0, x.shape[:-1])
