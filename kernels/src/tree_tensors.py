# SPDX-License-Identifier: Apache-2.0
"""Tensors of the trees of a batch of B requests, with up to N nodes each."""

from __future__ import annotations

import torch

Trees = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Token ids int64, parents, depths int32 and scores float32 [B, N], and counts int32 [B]."""


def empty_trees(*shape: int, device: torch.device | None = None) -> Trees:
    """Returns trees [..., N] with undefined contents."""
    parents, depths = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
    return (
        torch.empty(shape, dtype=torch.int64, device=device),
        parents,
        depths,
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape[:-1], dtype=torch.int32, device=device),
    )
