# SPDX-License-Identifier: Apache-2.0
"""Partial caches on a device: score keys, gather chosen tokens, append new ones.

Requests are columns int32 [4, n]: row among queries and lengths, row of the block table, region of
the pool, and whether tokens are chosen for it (1) or new tokens are appended (0). A region is
`blocks` consecutive pages of the pool.

A layer's choice for all requests takes a launch that scores, torch's top-k, and a launch that
gathers. Appending new tokens takes one launch for all requests and layers. The top-k decides
between equal scores. `scripts/gpu/partial_cache_reference.py` is the reference in torch.

The top-k is torch's: for a hundred thousand scores it makes several passes over the whole grid, one
launch each, which a Triton kernel would need too.

There are no races: a program writes only its own entries of a region of the pool, and reads nothing
that the launch writes.

Letters: R requests of a forward, n of these with a partial cache, C to choose for, S positions that
are scored, Hkv heads, Dh head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_specplug.kernels.key_scores import NEWEST, OLDER
from vllm_specplug.kernels.kv_compact_triton import ELEMENTS, LayerCaches
from vllm_specplug.kernels.step_kernel import step_kernel

# Positions, entries and regions per program of the kernels that score, gather and count.
_SCORED, _GATHERED, _COUNTED = 64, 16, 64


@triton.jit(
    do_not_specialize=["query_row", "columns_stride", "table_stride", "width"],
    do_not_specialize_on_alignment=["query", "columns", "lens", "block_table"],
)
def _score_keys_kernel(
    # [R, Hq, Dh]
    query,
    # [num_blocks, block_size, Hkv, 2 * Dh]
    pages,
    # [4, C] int32
    columns,
    # [R] int64
    lens,
    # [B, max_blocks] int32
    block_table,
    # [C, Hkv, width] float32
    scores,
    query_row,
    query_head,
    page_block,
    page_token,
    page_head,
    columns_stride,
    table_stride,
    width,
    num_heads,
    sink,
    recent,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    NEWEST: tl.constexpr,
    OLDER: tl.constexpr,
):
    choice, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, PADDED_DIM)
    row = tl.load(columns + choice).to(tl.int64)
    table = tl.load(columns + columns_stride + choice).to(tl.int64)
    length = tl.load(lens + row)
    is_context = at < length
    asked = tl.zeros((PADDED_DIM,), tl.float32)
    from_head = query + row * query_row + head * GROUP * query_head
    for member in range(0, GROUP):
        part = tl.load(from_head + member * query_head + dims, mask=dims < HEAD_DIM, other=0.0)
        asked += part.to(tl.float32)
    page = tl.load(block_table + table * table_stride + at // PAGE, mask=is_context, other=0)
    offset = page.to(tl.int64) * page_block + at % PAGE * page_token + head * page_head
    keys = tl.load(
        pages + offset[:, None] + dims[None, :],
        mask=is_context[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    score = tl.sum(keys * asked[None, :], 1)
    age = length - 1 - at
    newest = NEWEST - OLDER * tl.minimum(age, 127).to(tl.float32)
    score = tl.where(age < recent, newest, score)
    score = tl.where((at >= sink) & is_context, score, float("-inf"))
    tl.store(scores + (choice * num_heads + head) * width + at, score)


@triton.jit(
    do_not_specialize=["columns_stride", "table_stride"],
    do_not_specialize_on_alignment=["columns", "lens", "block_table"],
)
def _gather_chosen_kernel(
    # [C, Hkv, budget - sink] int64
    positions,
    # [num_blocks, block_size, Hkv, 2 * Dh], of integers as the pool
    pages,
    # [regions * blocks, block_size, Hkv, 2 * Dh], written
    pool,
    # [4, C] int32
    columns,
    # [R] int64
    lens,
    # [B, max_blocks] int32
    block_table,
    page_block,
    page_token,
    page_head,
    pool_block,
    pool_token,
    pool_head,
    columns_stride,
    table_stride,
    num_heads,
    budget,
    sink,
    blocks,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    choice, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    element = tl.arange(0, PADDED_WIDTH)
    inside = entry < budget
    row = tl.load(columns + choice).to(tl.int64)
    table = tl.load(columns + columns_stride + choice).to(tl.int64)
    region = tl.load(columns + 2 * columns_stride + choice).to(tl.int64)
    chosen = positions + (choice * num_heads + head) * (budget - sink) + entry - sink
    at = tl.load(chosen, mask=inside & (entry >= sink), other=0)
    # A context has more tokens than a region. Otherwise no pages of others must be followed.
    at = tl.minimum(tl.where(entry < sink, entry, at), tl.load(lens + row) - 1)
    page = tl.load(block_table + table * table_stride + at // PAGE, mask=inside, other=0)
    source = page.to(tl.int64) * page_block + at % PAGE * page_token + head * page_head
    target = (region * blocks + entry // PAGE) * pool_block + entry % PAGE * pool_token
    whole = inside[:, None] & (element < WIDTH)[None, :]
    found = tl.load(pages + source[:, None] + element[None, :], mask=whole)
    tl.store(pool + (target + head * pool_head)[:, None] + element[None, :], found, mask=whole)


@triton.jit(
    do_not_specialize=["columns_stride", "table_stride"],
    do_not_specialize_on_alignment=["columns", "lens", "block_table"],
)
def _append_to_tail_kernel(
    # [2, L] int64: addresses of each layer's pages and pool
    addresses,
    # [4, n] int32
    columns,
    # [R] int64
    lens,
    # [regions] int64
    covered,
    tails,
    # [B, max_blocks] int32
    block_table,
    columns_stride,
    table_stride,
    num_layers,
    page_block,
    page_token,
    page_head,
    pool_block,
    pool_token,
    pool_head,
    num_heads,
    blocks,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    grown, layer = tl.program_id(0), tl.program_id(1)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = element < num_heads * WIDTH
    pages = tl.load(addresses + layer).to(tl.pointer_type(ELEMENT))
    pool = tl.load(addresses + num_layers + layer).to(tl.pointer_type(ELEMENT))
    row = tl.load(columns + grown).to(tl.int64)
    table = block_table + tl.load(columns + columns_stride + grown).to(tl.int64) * table_stride
    region = tl.load(columns + 2 * columns_stride + grown).to(tl.int64)
    before = tl.load(covered + region)
    tail = tl.load(tails + region)
    head, within = element // WIDTH, element % WIDTH
    count = (tl.load(lens + row) - before).to(tl.int32)
    for k in range(0, count):
        at, entry = before + k, tail - k
        page = tl.load(table + at // PAGE).to(tl.int64)
        source = page * page_block + at % PAGE * page_token + head * page_head + within
        target = (region * blocks + entry // PAGE) * pool_block + entry % PAGE * pool_token
        found = tl.load(pages + source, mask=inside)
        tl.store(pool + target + head * pool_head + within, found, mask=inside)


@step_kernel
def _count_tokens_kernel(
    # [4, n] int32
    columns,
    # [R] int64
    lens,
    # [regions] int64, written
    covered,
    tails,
    columns_stride,
    count,
    budget,
    REGIONS: tl.constexpr,
):
    column = tl.program_id(0) * REGIONS + tl.arange(0, REGIONS)
    inside = column < count
    row = tl.load(columns + column, mask=inside, other=0)
    region = tl.load(columns + 2 * columns_stride + column, mask=inside, other=0)
    is_chosen = tl.load(columns + 3 * columns_stride + column, mask=inside, other=0)
    end = tl.load(lens + row, mask=inside, other=0)
    tail = tl.load(tails + region, mask=inside, other=0)
    tail -= end - tl.load(covered + region, mask=inside, other=0)
    tl.store(tails + region, tl.where(is_chosen != 0, budget - 1, tail), mask=inside)
    tl.store(covered + region, end, mask=inside)


# Of copies, like `ELEMENTS`.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def score_keys_triton(
    # [R, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, block_size, Hkv, 2 * Dh]
    pages: torch.Tensor,
    # int32 [4, C]
    columns: torch.Tensor,
    # int64 [R]
    lens: torch.Tensor,
    # int32 [B, max_blocks]
    block_table: torch.Tensor,
    *,
    sink: int,
    recent: int,
    most: int,
) -> torch.Tensor:
    """Returns the scores of the positions to choose from, float32 [C, Hkv, S]. No host
    synchronisation.

    A score is q . k in float32, summed over the query heads of a KV head. The `recent` newest
    positions score more than all others, the newest most. The first `sink` positions and those past
    the context score -inf. S is `most`, rounded up.
    """
    _, size, heads, width = pages.shape
    dim = width // 2
    assert query.stride(2) == 1 and pages.stride(3) == 1, (query.stride(), pages.stride())
    tiles = triton.cdiv(most, _SCORED)
    shape = (columns.shape[1], heads, tiles * _SCORED)
    scores = torch.empty(shape, dtype=torch.float32, device=pages.device)
    _score_keys_kernel[(tiles, heads, columns.shape[1])](
        query, pages, columns, lens, block_table, scores, *query.stride()[:2], *pages.stride()[:3],
        columns.stride(0), block_table.stride(0), shape[2], heads, sink, recent,
        GROUP=query.shape[1] // heads, HEAD_DIM=dim, PADDED_DIM=triton.next_power_of_2(dim),
        PAGE=size, TOKENS=_SCORED, NEWEST=NEWEST, OLDER=OLDER, num_warps=4,
    )  # fmt: skip
    return scores


def gather_chosen_triton(
    # int64 [C, Hkv, budget - sink]
    positions: torch.Tensor,
    # [num_blocks, block_size, Hkv, 2 * Dh]
    pages: torch.Tensor,
    # [regions * blocks (or more), block_size, Hkv, 2 * Dh], written
    pool: torch.Tensor,
    # int32 [4, C]
    columns: torch.Tensor,
    # int64 [R]
    lens: torch.Tensor,
    # int32 [B, max_blocks]
    block_table: torch.Tensor,
    *,
    sink: int,
    blocks: int,
) -> None:
    """Copies keys and values of the sink and of `positions` to the regions' first entries. No host
    synchronisation."""
    _, size, heads, width = pages.shape
    assert positions.is_contiguous() and pages.stride(3) == pool.stride(3) == 1
    budget, integers = sink + positions.shape[2], _INTEGERS[pages.element_size()]
    _gather_chosen_kernel[(triton.cdiv(budget, _GATHERED), heads, columns.shape[1])](
        positions, pages.view(integers), pool.view(integers), columns, lens, block_table,
        *pages.stride()[:3], *pool.stride()[:3], columns.stride(0), block_table.stride(0), heads,
        budget, sink, blocks, WIDTH=width, PADDED_WIDTH=triton.next_power_of_2(width), PAGE=size,
        ENTRIES=_GATHERED, num_warps=4,
    )  # fmt: skip


def append_to_tail_triton(
    # pages for keys and the pool for values: of every layer [.., block_size, Hkv, 2 * Dh]
    layers: LayerCaches,
    # int32 [4, n]
    columns: torch.Tensor,
    # int64 [R]
    lens: torch.Tensor,
    # int64 [regions]
    covered: torch.Tensor,
    tails: torch.Tensor,
    # int32 [B, max_blocks]
    block_table: torch.Tensor,
    *,
    blocks: int,
) -> None:
    """Replaces the tails of regions by new tokens in all layers, which have one shape; does not
    count them. No host synchronisation."""
    pages, pool = layers.keys[0], layers.values[0]
    _, size, heads, width = pages.shape
    assert pages.stride(3) == pool.stride(3) == 1, (pages.stride(), pool.stride())
    block = min(1024, triton.next_power_of_2(heads * width))
    grid = columns.shape[1], len(layers.keys), triton.cdiv(heads * width, block)
    _append_to_tail_kernel[grid](
        layers.addresses, columns, lens, covered, tails, block_table, columns.stride(0),
        block_table.stride(0), len(layers.keys), *pages.stride()[:3], *pool.stride()[:3], heads,
        blocks, WIDTH=width, PAGE=size, BLOCK=block, ELEMENT=ELEMENTS[pages.element_size()],
        num_warps=4,
    )  # fmt: skip


def count_tokens_triton(
    # int32 [4, n]
    columns: torch.Tensor,
    # int64 [R]
    lens: torch.Tensor,
    # int64 [regions] each, written
    covered: torch.Tensor,
    tails: torch.Tensor,
    *,
    budget: int,
) -> None:
    """Counts new tokens of regions. Tails begin again in regions with new choices. No host
    synchronisation."""
    count = columns.shape[1]
    _count_tokens_kernel[(triton.cdiv(count, _COUNTED),)](
        columns, lens, covered, tails, columns.stride(0), count, budget, REGIONS=_COUNTED,
        num_warps=2,
    )  # fmt: skip
