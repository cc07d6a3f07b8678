# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights packed the way vLLM packs the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform


def packed_linear(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [T, in] -> [T, out] for weight [out, in], in vLLM's fastest form for the device.

    Seam: packed_linear.
    """
    if not current_platform.is_cpu():
        return lambda x: torch.nn.functional.linear(x, weight, bias)
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return lambda x: layer.cpu_linear(x, layer.weight, layer.bias)
