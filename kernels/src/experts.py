# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture-of-experts MLP, for a few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .row_ops import gated_silu


def multiply_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
) -> torch.Tensor:
    """Returns the weighted sum of each row's experts, [T, H].

    The number of experts that run is read on the host, so a CUDA graph cannot capture it.

    Args:
        x: [T, H] rows.
        gate_up: [E, 2I, H] gate and up projections of the experts.
        down: [E, H, I] down projections.
        weights: float32 [T, K].
        expert_ids: integers [T, K], the experts of each row.
    """
    total = torch.zeros_like(x)
    for expert in expert_ids.unique().tolist():
        rows, ranks = (expert_ids == expert).nonzero(as_tuple=True)
        out = F.linear(gated_silu(F.linear(x[rows], gate_up[expert])), down[expert])
        total.index_add_(0, rows, out * weights[rows, ranks, None].to(out.dtype))
    return total
