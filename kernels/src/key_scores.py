# SPDX-License-Identifier: Apache-2.0
"""Scores cached keys with a query, for partial caches, which hold the important tokens of a long
context.

Letters: Hkv KV heads, Hq query heads, Dh head size.
"""

from __future__ import annotations

import torch

from .cpu_layout import CpuKvLayout

# Score of the newest position, and its difference to the one before: larger than every product,
# and exact in float32 for up to 127 positions.
NEWEST, OLDER = 2.0**127, 2.0**120


def key_scores(
    # [Hq, Dh], rotated
    query: torch.Tensor,
    # [num_blocks, Hkv, block_size, Dh] view as made by CpuKvLayout.views
    key_cache: torch.Tensor,
    # int64 or int32 [num_request_blocks]
    blocks: torch.Tensor,
    layout: CpuKvLayout,
) -> torch.Tensor:
    """Returns the importance of every cached key: q.k, unscaled, summed over the heads of its
    group.

    Returns:
        float32 [Hkv, num_request_blocks * block_size], undefined for slots that were not written.
    """
    num_heads = key_cache.shape[1]
    # The sum of products with a key is the product with the sum.
    summed = query.float().unflatten(0, (num_heads, -1)).sum(1)
    # [block_size * Dh]: token and dimension of each element of a block
    flat = layout.tables[0].flatten().long()
    dims = torch.empty_like(flat)
    dims[flat] = torch.arange(layout.head_size).repeat(layout.block_size)
    keys = key_cache[blocks.long()].flatten(2).float()  # [n, Hkv, block_size * Dh]
    products = keys * summed[:, dims]
    scores = products[..., flat].unflatten(-1, (layout.block_size, layout.head_size)).sum(-1)
    return scores.transpose(0, 1).flatten(1)
