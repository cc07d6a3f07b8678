# SPDX-License-Identifier: Apache-2.0
"""Compacts accepted paths in the paged cache of all layers in one launch.

There are no races: all moves of a request, for one layer and one range of elements, belong to one
program, which makes them in ascending order. Every thread loads and stores the same elements of
each slot, so program order within a thread suffices. Since destinations never exceed their sources
and both ascend, no move writes a slot that a later move reads; two requests never share a slot that
moves.

Letters: R requests, D moves at most per request, L layers, Hkv heads, Dh head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


# Numbers that change from step to step must not make new variants of the kernel.
@triton.jit(
    do_not_specialize=["paths_stride", "table_stride"],
    do_not_specialize_on_alignment=["paths", "lengths", "context_lens", "req_indices"],
)
def _compact_paths_kernel(
    # [2, L] int64: addresses of each layer's keys and values
    addresses,
    # [R, D] int32: accepted nodes from the root down, of which `lengths` count
    paths,
    # [R] int32
    lengths,
    # [R] int32: slots before the root
    context_lens,
    # [R] int64: row of block_table
    req_indices,
    # [B, max_blocks] int32
    block_table,
    paths_stride,
    table_stride,
    num_layers,
    num_heads,
    key_block,
    key_token,
    key_head,
    key_dim,
    value_block,
    value_token,
    value_head,
    value_dim,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    request = tl.program_id(0)
    layer = tl.program_id(1) // 2
    is_value = tl.program_id(1) % 2
    block_stride = tl.where(is_value == 1, value_block, key_block).to(tl.int64)
    token_stride = tl.where(is_value == 1, value_token, key_token).to(tl.int64)
    head_stride = tl.where(is_value == 1, value_head, key_head).to(tl.int64)
    count = tl.load(lengths + request)
    context = tl.load(context_lens + request)
    table = block_table + tl.load(req_indices + request).to(tl.int64) * table_stride
    address = tl.load(addresses + is_value * num_layers + layer)
    cache = address.to(tl.pointer_type(ELEMENT))
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = element < num_heads * HEAD_DIM
    dim = element % HEAD_DIM
    offset = element // HEAD_DIM * head_stride + tl.where(
        is_value == 1, dim * value_dim, dim * key_dim
    )
    for k in range(0, count):
        node = tl.load(paths + request * paths_stride + k)
        if node != k:
            source = context + 1 + node
            target = context + 1 + k
            from_page = tl.load(table + source // PAGE).to(tl.int64)
            to_page = tl.load(table + target // PAGE).to(tl.int64)
            from_slot = from_page * block_stride + source % PAGE * token_stride
            to_slot = to_page * block_stride + target % PAGE * token_stride
            value = tl.load(cache + from_slot + offset, mask=inside)
            tl.store(cache + to_slot + offset, value, mask=inside)


@dataclass(frozen=True)
class LayerCaches:
    """The caches of all layers for one launch: equal shapes and strides, any address."""

    # [2, L] int64 on the device: keys, values
    addresses: torch.Tensor
    # per layer [num_blocks, block_size, Hkv, Dh]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, views: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> LayerCaches:
        """Makes it from each layer's key and value view [num_blocks, block_size, Hkv, Dh].

        Raises:
            ValueError: if two layers differ in shape, stride or dtype.
        """
        keys, values = zip(*views, strict=True)
        for half in (keys, values):
            first = half[0]
            for cache in half:
                if (cache.shape, cache.stride(), cache.dtype) != (
                    first.shape,
                    first.stride(),
                    first.dtype,
                ):
                    raise ValueError(
                        "all layers of one KV cache group must have one shape, stride and dtype; "
                        f"got {tuple(first.shape)} {first.dtype} and {tuple(cache.shape)} "
                        f"{cache.dtype}"
                    )
        addresses = torch.tensor([[c.data_ptr() for c in half] for half in (keys, values)])
        return cls(addresses.to(keys[0].device), tuple(keys), tuple(values))


# Moves copy bits: one integer type per size serves every dtype.
ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


def compact_paths_triton(
    layers: LayerCaches,
    # [R, D] int32
    paths: torch.Tensor,
    # [R] int32
    lengths: torch.Tensor,
    # [R] int32
    context_lens: torch.Tensor,
    # [R] int64 row of each request in the table
    req_indices: torch.Tensor,
    # [B, max_blocks] int32
    block_table: torch.Tensor,
) -> None:
    """Moves K and V of node paths[r, k] to the slot of node k, for k < lengths[r].

    Node i of a request is in slot context_lens[r] + 1 + i of its blocks. Paths ascend, because
    parents precede children. No host synchronisation.
    """
    key, value = layers.keys[0], layers.values[0]
    _, page, num_heads, head_dim = key.shape
    num_layers = len(layers.keys)
    if paths.numel() == 0:
        return
    for matrix in (paths, block_table):
        # The stride of a single column is undefined.
        assert matrix.shape[1] == 1 or matrix.stride(1) == 1, matrix.stride()
    # Eight elements per thread; several programs share the heads of a slot.
    block = min(1024, triton.next_power_of_2(num_heads * head_dim))
    _compact_paths_kernel[
        (paths.shape[0], 2 * num_layers, triton.cdiv(num_heads * head_dim, block))
    ](
        layers.addresses,
        paths,
        lengths,
        context_lens,
        req_indices,
        block_table,
        paths.stride(0),
        block_table.stride(0),
        num_layers,
        num_heads,
        *key.stride(),
        *value.stride(),
        PAGE=page,
        HEAD_DIM=head_dim,
        BLOCK=block,
        ELEMENT=ELEMENTS[key.element_size()],
        num_warps=4,
    )
