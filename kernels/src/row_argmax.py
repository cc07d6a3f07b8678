# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of many rows of logits."""

from __future__ import annotations

import torch

from .extension import has_cpu_extension

_COMPILED = (torch.bfloat16, torch.float16, torch.float32)


def row_argmax(rows: torch.Tensor) -> torch.Tensor:
    """Returns `rows.argmax(dim=-1)` of [T, V], int64 [T]: the first of equal entries, NaN above
    all.

    On a CPU core torch takes 0.2 ms for 49,152 bf16 logits, as much as another row in all layers of
    a model of 135M parameters. Reading them once takes a thirtieth of that.
    """
    if (
        rows.device.type == "cpu"
        and rows.dtype in _COMPILED
        and rows.is_contiguous()
        and has_cpu_extension()
    ):
        indices = torch.empty(rows.shape[0], dtype=torch.int64)
        torch.ops.specplug.row_argmax.default(rows, indices)
        return indices
    return rows.argmax(dim=-1)
