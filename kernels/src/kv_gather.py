# SPDX-License-Identifier: Apache-2.0
"""Copies chosen tokens between caches, and scores cached keys with a query.

Both are for partial caches, which hold the important tokens of a long context. Letters: L
layers, Hkv KV heads, Hq query heads, Dh head size, M tokens, T context tokens.
"""

from __future__ import annotations

import torch

from .cpu_layout import CpuKvLayout
from .extension import has_cpu_extension

# Score of the newest position, and its difference to the one before: larger than every product,
# and exact in float32 for up to 127 positions.
NEWEST, OLDER = 2.0**127, 2.0**120


def gather_kv(
    # L tensors, each [num_blocks, Hkv, block_size, 2 * Dh]
    src_caches: list[torch.Tensor],
    # L tensors of the same layout, any number of blocks
    dst_caches: list[torch.Tensor],
    # int64 [L or 1, Hkv or 1, M]
    src_slots: torch.Tensor,
    # int64 [M]
    dst_slots: torch.Tensor,
    layout: CpuKvLayout,
) -> None:
    """Copies K and V of slot src_slots[l, h, i] to slot dst_slots[i] of layer l and head h.

    Raises:
        RuntimeError: if shapes disagree or a slot is outside its cache.
    """
    if has_cpu_extension():
        torch.ops.specplug.gather_kv.default(
            src_caches, dst_caches, src_slots.contiguous(), dst_slots, layout.tables
        )
        return
    gather_kv_reference(src_caches, dst_caches, src_slots, dst_slots, layout)


def gather_kv_reference(
    src_caches: list[torch.Tensor],
    dst_caches: list[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    layout: CpuKvLayout,
) -> None:
    """`gather_kv` in torch."""
    size, count = layout.block_size, dst_slots.numel()
    heads = src_caches[0].shape[1]
    slots = src_slots.expand(len(src_caches), heads, count)
    # [2, M, Dh] element offsets of the destination tokens
    to = layout.tables[:, dst_slots % size].long()
    for layer, (src, dst) in enumerate(zip(src_caches, dst_caches, strict=True)):
        for source, target, table, offsets in zip(
            layout.views(src), layout.views(dst), layout.tables, to, strict=True
        ):
            for head in range(heads):
                picked = slots[layer, head]
                blocks = source[picked // size, head].flatten(1)
                values = blocks.gather(1, table[picked % size].long())
                for i, slot in enumerate(dst_slots.tolist()):
                    # A view of a block is not contiguous over heads, but within one head.
                    target[slot // size, head].view(-1)[offsets[i]] = values[i]


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
