# SPDX-License-Identifier: Apache-2.0
"""Torch versions of the kernels: the reference on every device, and the fallback on the CPU.

They read lengths on the host, so on a GPU they synchronise and cannot be captured in a graph.
"""

from __future__ import annotations

import torch

from .cpu_layout import CpuKvLayout
from .features import PLAIN, AttnFeatures
from .masks import ancestor_mask, words_to_bool
from .metadata import TreeAttnMetadata


class PagedKvLayout:
    """The caches of `cuda_contract`, [num_blocks, block_size, Hkv, Dh] with any strides."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def gather(
        self, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of the given slots [L], each [L, Hkv, Dh]."""
        at = slots // self.block_size, slots % self.block_size
        if key_cache.element_size() == 1:  # torch cannot index all 8-bit dtypes
            key, value = (c.view(torch.uint8)[at].view(c.dtype) for c in (key_cache, value_cache))
            return key, value
        return key_cache[at], value_cache[at]


def tree_attn_reference(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # as `layout` reads them
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    layout: CpuKvLayout | PagedKvLayout,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None = None,
    tail_value: torch.Tensor | None = None,
    *,
    features: AttnFeatures = PLAIN,
) -> None:
    """See `dispatch.tree_attn`. Sums in float32, or float64 for a float64 query."""
    for request, start, rows, context, first in meta.plan.t().tolist():
        if rows == 0:
            continue
        cached = context if tail_key is not None else context + rows
        # The root attends the earliest position. Earlier pages may be freed.
        begin = max(0, context - features.window + 1) if features.window else 0
        k, v = _cached(
            meta, request, range(begin, cached), key_cache, value_cache, layout, features
        )
        if tail_key is not None and tail_value is not None:
            k = torch.cat([k, tail_key[first : first + rows]])
            v = torch.cat([v, tail_value[first : first + rows]])
        attended = torch.ones(rows, context + rows, dtype=torch.bool, device=query.device)
        attended[:, context:] = _own_rows(meta, first, rows)
        distance = None
        if features.window or features.alibi_slopes is not None:
            own = context - 1 + attended[:, context:].tril().sum(1)
            positions = torch.cat([torch.arange(context, device=own.device), own])
            distance = own[:, None] - positions
            if features.window:
                attended &= distance < features.window
            distance = distance[:, begin:]
        out = dense_attention(
            query[start : start + rows],
            k,
            v,
            scale,
            query.shape[1] // k.shape[1],
            attended[:, begin:],
            features=features,
            distance=distance,
        )
        output[start : start + rows] = out.to(output.dtype)


def tree_attn_cuda_reference(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, block_size, Hkv, Dh]
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None = None,
    tail_value: torch.Tensor | None = None,
    *,
    features: AttnFeatures = PLAIN,
) -> None:
    """`tree_attn_reference` as the call of `cuda_contract`."""
    layout = PagedKvLayout(key_cache.shape[1])
    tree_attn_reference(
        query, key_cache, value_cache, output, meta, scale, layout, tail_key, tail_value,
        features=features,
    )  # fmt: skip


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
    *,
    features: AttnFeatures = PLAIN,
    # [n, L] positions between row and key; read for ALiBi
    distance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns attention [n, Hq, Dh] in float32, or in float64 for a float64 query. Rows without
    keys are zero. The mask must include the window."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    k = key.to(wide).repeat_interleave(group_size, dim=1)
    v = value.to(wide).repeat_interleave(group_size, dim=1)
    scores = torch.einsum("ihd,jhd->hij", query.to(wide), k) * (scale * features.key_scale)
    if features.soft_cap:
        scores = features.soft_cap * (scores / features.soft_cap).tanh()
    if features.alibi_slopes is not None:
        assert distance is not None
        scores -= features.alibi_slopes.to(wide)[:, None, None] * distance
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    if features.sinks is not None:
        sink = features.sinks.to(wide)[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(key)]
    # The softmax of no score is NaN.
    weights.masked_fill_(scores.isneginf().all(dim=-1, keepdim=True), 0.0)
    return torch.einsum("hij,jhd->ihd", weights, v) * features.value_scale


def _cached(
    meta: TreeAttnMetadata,
    request: int,
    slots: range,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: CpuKvLayout | PagedKvLayout,
    features: AttnFeatures = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V of a request's `slots`, each [len(slots), Hkv, Dh], times the scales of a
    cache on CUDA."""
    size = layout.block_size
    positions = torch.arange(slots.start, slots.stop, device=meta.block_table.device)
    blocks = meta.block_table[request].long()[positions // size]
    parts = layout.gather(key_cache, value_cache, blocks * size + positions % size)
    scales = features.key_scales, features.value_scales
    if scales[0] is None:
        return parts
    if features.token_scales:
        scales = tuple(s[blocks, positions % size] for s in scales)
    k, v = (part.float() * s.unsqueeze(-1) for part, s in zip(parts, scales, strict=True))
    return k, v


def _own_rows(meta: TreeAttnMetadata, first: int, rows: int) -> torch.Tensor | bool:
    """Returns bool [rows, rows]: the rows of its tree (mask rows from `first` on) that a row
    attends."""
    if meta.mask_kind == "full":
        return True
    # The buffer of words may be unused if a kernel reads the parents.
    if meta.parent_rows is not None:
        return ancestor_mask(meta.parent_rows[first : first + rows])
    assert meta.mask_words is not None
    return words_to_bool(meta.mask_words[first : first + rows], rows)


def copy_kv_reference(
    src_caches: list[torch.Tensor],
    dst_caches: list[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    layout: CpuKvLayout,
) -> None:
    """See `dispatch.copy_kv`."""
    size, interior = layout.block_size, layout.block_size * layout.head_size
    heads = src_caches[0].shape[1]
    slots = src_slots.expand(len(src_caches), heads, -1).tolist()
    for layer, caches in enumerate(zip(src_caches, dst_caches, strict=True)):
        for half, table in enumerate(layout.tables.long()):
            # [num_blocks, Hkv, block_size * Dh]
            source, target = (
                cache.flatten(2)[..., half * interior :][..., :interior] for cache in caches
            )
            for head in range(heads):
                for src, dst in zip(slots[layer][head], dst_slots.tolist(), strict=True):
                    values = source[src // size, head][table[src % size]]
                    target[dst // size, head][table[dst % size]] = values
