# SPDX-License-Identifier: Apache-2.0
"""Readable torch versions of the kernels: the oracle, and the fallback without a compiler."""

from __future__ import annotations

import numpy as np
import torch

from .cpu_layout import CpuKvLayout
from .metadata import TreeAttnMetadata, words_to_bool


def tree_attn_reference(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, Hkv, block_size, Dh] views as made by CpuKvLayout.views
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    layout: CpuKvLayout,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None = None,
    tail_value: torch.Tensor | None = None,
) -> None:
    """See `dispatch.tree_attn`. Sums in float32, or float64 for a float64 query."""
    num_heads = query.shape[1]
    group_size = num_heads // key_cache.shape[1]
    for req, start, rows, context, first in meta.plan.t().tolist():
        mask = words_to_bool(meta.mask_words[first : first + rows], rows)  # [rows, rows]
        length = context if tail_key is not None else context + rows
        positions = torch.arange(length)
        blocks = meta.block_table[req].long()[positions // layout.block_size]
        slots = blocks * layout.block_size + positions % layout.block_size
        k, v = layout.gather(key_cache, value_cache, slots)  # [length, Hkv, Dh]
        if tail_key is not None:
            k = torch.cat([k, tail_key[first : first + rows]])
            v = torch.cat([v, tail_value[first : first + rows]])
        attended = torch.cat([torch.ones(rows, context, dtype=torch.bool), mask], dim=1)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        k = k.to(wide).repeat_interleave(group_size, dim=1)  # [L, Hq, Dh]
        v = v.to(wide).repeat_interleave(group_size, dim=1)
        q = query[start : start + rows].to(wide)
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale  # [Hq, rows, L]
        scores.masked_fill_(~attended, float("-inf"))
        weights = scores.softmax(dim=-1)
        output[start : start + rows] = torch.einsum("hij,jhd->ihd", weights, v).to(output.dtype)


def prefix_attn_reference(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, Hkv, block_size, Dh] views as made by CpuKvLayout.views
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    # float32 [T, Hq], written in place
    lse: torch.Tensor | None,
    meta: TreeAttnMetadata,
    scale: float,
    layout: CpuKvLayout,
) -> None:
    """See `hybrid_attn.prefix_attn`."""
    group_size = query.shape[1] // key_cache.shape[1]
    for req, start, rows, context, _ in meta.plan.t().tolist():
        positions = torch.arange(context)
        blocks = meta.block_table[req].long()[positions // layout.block_size]
        slots = blocks * layout.block_size + positions % layout.block_size
        k, v = layout.gather(key_cache, value_cache, slots)
        out, part = dense_attention(query[start : start + rows], k, v, scale, group_size, None)
        output[start : start + rows] = out.to(output.dtype)
        if lse is not None:
            lse[start : start + rows] = part


def dense_attention(
    # [n, Hq, Dh]
    query: torch.Tensor,
    # [L, Hkv, Dh]
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    group_size: int,
    # bool [n, L]
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp: float32 [n, Hq, Dh] and [n, Hq]; rows without keys are zero
    with a log-sum-exp of -inf. float64 for a float64 query."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    k = key.to(wide).repeat_interleave(group_size, dim=1)
    v = value.to(wide).repeat_interleave(group_size, dim=1)
    scores = torch.einsum("ihd,jhd->hij", query.to(wide), k) * scale
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    lse = scores.logsumexp(dim=-1)  # [Hq, n]
    weights = (scores - lse.unsqueeze(-1)).exp()
    weights.masked_fill_(lse.isneginf().unsqueeze(-1), 0.0)
    return torch.einsum("hij,jhd->ihd", weights, v), lse.t()


def tree_part_attn_reference(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [M, Hkv, Dh]
    key: torch.Tensor,
    value: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    # float32 [T, Hq], written in place
    lse: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
) -> None:
    """See `hybrid_attn.tree_part_attn`."""
    for _, start, rows, _, first in meta.plan.t().tolist():
        of_tree = slice(first, first + rows)
        out, part = dense_attention(
            query[start : start + rows],
            key[of_tree],
            value[of_tree],
            scale,
            query.shape[1] // key.shape[1],
            words_to_bool(meta.mask_words[of_tree], rows),
        )
        output[start : start + rows] = out.to(output.dtype)
        lse[start : start + rows] = part


def merge_attn_reference(
    # [T, Hq, Dh], updated in place
    output: torch.Tensor,
    # float32 [T, Hq], updated in place
    lse: torch.Tensor,
    # [T, Hq, Dh]
    other: torch.Tensor,
    # float32 [T, Hq]
    other_lse: torch.Tensor,
) -> None:
    """See `hybrid_attn.merge_attn`."""
    total = torch.logaddexp(lse, other_lse)
    # The weight of a side is exp(own - total); nothing on both sides keeps the first.
    mine = torch.where(total.isneginf(), 1.0, (lse - total).exp()).unsqueeze(-1)
    theirs = torch.where(other_lse.isneginf(), 0.0, (other_lse - total).exp()).unsqueeze(-1)
    merged = mine * output.float().masked_fill(mine == 0, 0.0) + theirs * other.float().masked_fill(
        theirs == 0, 0.0
    )
    output.copy_(merged)
    lse.copy_(total)


def compact_kv_reference(
    # each [num_blocks, Hkv, block_size, 2 * Dh]
    kv_caches: list[torch.Tensor],
    # [P] int64
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    layout: CpuKvLayout,
) -> None:
    """See `dispatch.compact_kv`."""
    size = layout.block_size
    for kv_cache in kv_caches:
        for cache, table in zip(layout.views(kv_cache), layout.tables.long(), strict=True):
            num_blocks, num_heads = cache.shape[:2]
            interior = cache.as_strided(
                (num_blocks, num_heads, size * layout.head_size),
                (cache.stride(0), cache.stride(1), 1),
                cache.storage_offset(),
            )
            for src, dst in zip(src_slots.tolist(), dst_slots.tolist(), strict=True):
                interior[dst // size][:, table[dst % size]] = interior[src // size][
                    :, table[src % size]
                ]


def fill_ancestor_words_reference(
    # [sum of N] int32
    parents: np.ndarray,
    # [R] int32
    row_counts: np.ndarray,
    # [M, W] int64, zeroed
    words: torch.Tensor,
) -> None:
    """See `metadata.ancestor_words`."""
    rows = words.numpy().view(np.uint64)
    start = done = 0
    for tree, count in enumerate(row_counts.tolist()):
        rows[start, 0] = 1
        for j in range(1, count):
            up = int(parents[done]) + 1  # row of the parent
            done += 1
            if not 0 <= up < j:
                raise ValueError(
                    f"node {j - 1} of tree {tree} has parent {up - 1}; a parent precedes its "
                    "child and -1 is the root"
                )
            rows[start + j] = rows[start + up]
            rows[start + j, j // 64] |= np.uint64(1) << np.uint64(j % 64)
        start += count
