# SPDX-License-Identifier: Apache-2.0
"""Partial caches of a paged cache in torch: the reference of `kernels.partial_cache_triton`, which
describes the columns and the letters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_specplug.kernels.key_scores import NEWEST, OLDER

# Rows of the columns.
ROW, TABLE, REGION, IS_CHOSEN = range(4)


def score_keys(
    # [R, Hq, Dh], rotated, of the tokens that follow the contexts
    query: torch.Tensor,
    # [num_blocks, block_size, Hkv, 2 * Dh], keys before values
    pages: torch.Tensor,
    # int32 [4, C]
    columns: torch.Tensor,
    # int64 [R] tokens of the contexts
    lens: torch.Tensor,
    # int32 [B, max_blocks]
    block_table: torch.Tensor,
    *,
    sink: int,
    recent: int,
    most: int,
) -> torch.Tensor:
    """Returns the scores of the positions to choose from, float32 [C, Hkv, S].

    A score is q . k in float32, summed over the query heads of a KV head, which is the product with
    the sum of queries. The `recent` newest positions score more than all others, the newest most.
    The first `sink` positions and those past the context score -inf.

    Args:
        most: bound of the contexts; S is at least that.
    """
    size, heads = pages.shape[1:3]
    dim = pages.shape[3] // 2
    lengths = lens[columns[ROW].long()][:, None]
    at = torch.arange(most, device=pages.device)
    is_context = at < lengths
    blocks = block_table[columns[TABLE].long()].long()[:, at // size]
    blocks = torch.where(is_context, blocks, 0)
    # [C, S, Hkv, Dh]
    keys = pages[blocks, at % size][..., :dim].float()
    asked = query[columns[ROW].long()].float().unflatten(1, (heads, -1)).sum(2)
    scores = torch.einsum("cshd,chd->chs", keys, asked)
    ages = lengths - 1 - at
    scores = torch.where((ages < recent)[:, None], (NEWEST - OLDER * ages)[:, None], scores)
    is_candidate = (at >= sink) & is_context
    return scores.masked_fill(~is_candidate[:, None], float("-inf"))


def gather_chosen(
    # int64 [C, Hkv, budget - sink], most important first
    positions: torch.Tensor,
    pages: torch.Tensor,
    # [regions * blocks (or more), block_size, Hkv, 2 * Dh], written
    pool: torch.Tensor,
    # int32 [4, C]
    columns: torch.Tensor,
    block_table: torch.Tensor,
    *,
    sink: int,
    blocks: int,
) -> None:
    """Copies keys and values of the sink and of `positions` to the regions' first entries."""
    size, heads = pages.shape[1:3]
    every = torch.arange(heads, device=pages.device)[:, None]
    for c, (table, region) in enumerate(columns[TABLE : REGION + 1].T.tolist()):
        first = torch.arange(sink, device=pages.device).expand(heads, -1)
        at = torch.cat((first, positions[c]), dim=1)
        found = pages[block_table[table].long()[at // size], at % size, every]
        start = region * blocks * size
        pool.flatten(0, 1)[start : start + at.shape[1]] = found.transpose(0, 1)


def append_to_tail(
    # per layer, as `pages` and `pool` above
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    # int32 [4, n] of requests with new tokens
    columns: torch.Tensor,
    lens: torch.Tensor,
    # int64 [regions]: context tokens that a region has seen, and the entry that the next token
    # replaces
    covered: torch.Tensor,
    tails: torch.Tensor,
    block_table: torch.Tensor,
    *,
    blocks: int,
) -> None:
    """Replaces the tails of regions by new tokens in all layers; does not count them."""
    for row, table, region in columns[:IS_CHOSEN].T.tolist():
        positions = torch.arange(int(covered[region]), int(lens[row]), device=lens.device)
        for pages, pool in layers:
            size = pages.shape[1]
            slots = region * blocks * size + int(tails[region])
            slots -= torch.arange(len(positions), device=lens.device)
            found = pages[block_table[table].long()[positions // size], positions % size]
            pool.flatten(0, 1)[slots] = found


def count_tokens(
    # int32 [4, n]
    columns: torch.Tensor,
    lens: torch.Tensor,
    # int64 [regions] each, written
    covered: torch.Tensor,
    tails: torch.Tensor,
    *,
    budget: int,
) -> None:
    """Counts new tokens of regions. Tails begin again in regions with new choices."""
    for row, _, region, is_chosen in columns.T.tolist():
        new = int(lens[row]) - int(covered[region])
        tails[region] = budget - 1 if is_chosen else tails[region] - new
        covered[region] = lens[row]
