# SPDX-License-Identifier: Apache-2.0
"""The CUDA contract in readable torch: oracle of the kernels, and what serves where none runs.

It reads lengths on the host, so it synchronises and cannot be captured in a graph.
"""

from __future__ import annotations

import torch

from .cuda_contract import CudaTreeMetadata


def tree_attn_cuda_reference(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, block_size, Hkv, Dh]
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    meta: CudaTreeMetadata,
    scale: float,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None = None,
    tail_value: torch.Tensor | None = None,
) -> None:
    """See `cuda_contract`. Sums in float32, or float64 for a float64 query."""
    page, num_kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // num_kv_heads
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    for request, start, rows, context, first in meta.plan.t().tolist():
        if rows == 0:
            continue
        dense = tail_key is not None
        positions = torch.arange(context if dense else context + rows, device=query.device)
        blocks = meta.block_table[request].long()[positions // page]
        k = key_cache[blocks, positions % page]  # [L, Hkv, Dh]
        v = value_cache[blocks, positions % page]
        if tail_key is not None and tail_value is not None:
            k = torch.cat([k, tail_key[first : first + rows]])
            v = torch.cat([v, tail_value[first : first + rows]])
        shown = torch.ones(rows, context + rows, dtype=torch.bool, device=query.device)
        if meta.mask_kind == "tree":
            shown[:, context:] = ancestor_mask(meta.parent_rows[first : first + rows])
        k = k.to(wide).repeat_interleave(group, dim=1)
        v = v.to(wide).repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", query[start : start + rows].to(wide), k) * scale
        weights = scores.masked_fill_(~shown, float("-inf")).softmax(dim=-1)
        output[start : start + rows] = torch.einsum("hij,jhd->ihd", weights, v).to(output.dtype)


def ancestor_mask(
    # [n] int32, row of each row's parent, -1 for none
    parent_rows: torch.Tensor,
) -> torch.Tensor:
    """bool [n, n]: row i is row j or descends from it."""
    n = parent_rows.numel()
    mask = torch.eye(n, dtype=torch.bool)
    for i, parent in enumerate(parent_rows.tolist()):
        if 0 <= parent < i:
            mask[i] |= mask[parent]
    return mask.to(parent_rows.device)
