# SPDX-License-Identifier: Apache-2.0
"""Moves accepted paths together in the paged cache, in all layers, by one launch.

Order without races: all moves of a request, for one layer and one stretch of elements, belong to
one program, which makes them one after the other in ascending order. Every thread loads and stores
the same elements of each slot, so program order within a thread is all that is needed. Since
destinations never exceed their sources and both ascend, no move writes a slot that a later move
reads; two requests never share a slot that moves.

Letters: R requests, D moves at most per request, L layers, N values of one slot and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@triton.jit
def _compact_paths_kernel(
    # [L] int64: address of each layer's cache
    addresses,
    # [R, D] int32: accepted nodes from the root down, of which `lengths` count
    paths,
    # [R] int32
    lengths,
    # [R] int32: slots before the root
    context_lens,
    # [R] int32: row of block_table
    req_indices,
    # [B, max_blocks] int32
    block_table,
    paths_stride,
    table_stride,
    num_heads,
    block_stride,
    token_stride,
    head_stride,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    request = tl.program_id(0)
    layer = tl.program_id(1)
    count = tl.load(lengths + request)
    context = tl.load(context_lens + request)
    table = block_table + tl.load(req_indices + request).to(tl.int64) * table_stride
    cache = tl.load(addresses + layer).to(tl.pointer_type(ELEMENT))
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = element < num_heads * WIDTH
    place = (element // WIDTH).to(tl.int64) * head_stride + element % WIDTH
    for k in range(0, count):
        node = tl.load(paths + request * paths_stride + k)
        if node != k:
            source = context + 1 + node
            target = context + 1 + k
            from_page = tl.load(table + source // PAGE).to(tl.int64)
            to_page = tl.load(table + target // PAGE).to(tl.int64)
            from_slot = from_page * block_stride + (source % PAGE).to(tl.int64) * token_stride
            to_slot = to_page * block_stride + (target % PAGE).to(tl.int64) * token_stride
            value = tl.load(cache + from_slot + place, mask=inside)
            tl.store(cache + to_slot + place, value, mask=inside)


@dataclass(frozen=True)
class LayerCaches:
    """The caches of all layers as one launch takes them: equal shapes and strides, any address."""

    # [L] int64 on the device
    addresses: torch.Tensor
    caches: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, caches: Sequence[torch.Tensor]) -> LayerCaches:
        """From caches [num_blocks, Hkv, block_size, 2 * Dh] of one shape, dtype and stride.

        Raises:
            ValueError: if two of them differ.
        """
        first = caches[0]
        for cache in caches:
            if (cache.shape, cache.stride(), cache.dtype) != (
                first.shape,
                first.stride(),
                first.dtype,
            ):
                raise ValueError(
                    "all layers of one KV cache group must have one shape, stride and dtype; "
                    f"got {tuple(first.shape)} {first.dtype} and {tuple(cache.shape)} {cache.dtype}"
                )
        assert first.stride(3) == 1, first.stride()
        addresses = torch.tensor([c.data_ptr() for c in caches], dtype=torch.int64)
        return cls(addresses.to(first.device), tuple(caches))


# Moves are of bits: one integer type a size serves every dtype.
_ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


def compact_paths_triton(
    layers: LayerCaches,
    # [R, D] int32
    paths: torch.Tensor,
    # [R] int32
    lengths: torch.Tensor,
    # [R] int32
    context_lens: torch.Tensor,
    # [R] int32
    req_indices: torch.Tensor,
    # [B, max_blocks] int32
    block_table: torch.Tensor,
) -> None:
    """Moves K and V of node paths[r, k] to where node k stands, for k < lengths[r].

    Node i of a request lies at slot context_lens[r] + 1 + i of its blocks. Paths ascend, since
    parents precede children. No host synchronisation.
    """
    cache = layers.caches[0]
    _, num_heads, page, width = cache.shape
    if paths.numel() == 0:
        return
    size = cache.element_size()
    # 16 bytes a thread and a few programs for each slot of each layer.
    block = min(1024, triton.next_power_of_2(num_heads * width))
    _compact_paths_kernel[
        (paths.shape[0], len(layers.caches), triton.cdiv(num_heads * width, block))
    ](
        layers.addresses,
        paths,
        lengths,
        context_lens,
        req_indices,
        block_table,
        paths.stride(0),
        block_table.stride(0),
        num_heads,
        cache.stride(0),
        cache.stride(2),
        cache.stride(1),
        PAGE=page,
        WIDTH=width,
        BLOCK=block,
        ELEMENT=_ELEMENTS[size],
        num_warps=4,
    )
