# SPDX-License-Identifier: Apache-2.0
"""Tree attention over a cache of latent rows (multi-head latent attention, absorbed).

A cache row is a token's compressed keys and values, L numbers, and its rotary key, P numbers.
Queries are multiplied into that space, so one row is the key of every head, and its first L numbers
are the value (DeepSeek-V2, arXiv:2405.04434, section 2.1).

All heads of all rows of a tree read the same context, so one matrix product suffices. In torch it
is faster per row than a loop over rows and heads.

Letters: T query rows, H heads, D = L + P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .extension import is_reference_asked
from .reference import dense_attention

# Scores of one matrix product: float32, so that they and the rows behind them stay in a cache.
_MOST_SCORES = 1 << 20
# Tokens of the shortest product.
_FEWEST_TOKENS = 64


@dataclass(frozen=True)
class LatentSpan:
    """Consecutive query rows of a request that attend its context and each other."""

    request: int
    """Row of the block table."""
    first_row: int
    """First row in the query."""
    context: int
    """Tokens before the first row; row j of the span has its cache row at slot context + j."""
    # bool [n, n]: row i attends row j of the span; a row attends the first one and itself
    mask: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.mask.shape[0]


def latent_attn(
    # [T, H, D]
    query: torch.Tensor,
    # [num_blocks, block_size, D]
    cache: torch.Tensor,
    # [T, H, L], written in place at the rows of the spans
    output: torch.Tensor,
    spans: Sequence[LatentSpan],
    # [B, max_blocks] integers
    block_table: torch.Tensor,
    scale: float,
) -> None:
    """Computes the attention of each span's rows over slots [0, context) of its request and the
    rows that its mask selects. Sums are float32, or float64 for a float64 query.

    Raises:
        IndexError, RuntimeError: if a span points outside the block table or the cache.
    """
    attend = _attend_reference if is_reference_asked() else _attend
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        output[rows] = attend(query[rows], cache, span, block_table, scale, output.shape[-1])


def _attend(
    # [n, H, D]
    query: torch.Tensor,
    cache: torch.Tensor,
    span: LatentSpan,
    block_table: torch.Tensor,
    scale: float,
    value_size: int,
) -> torch.Tensor:
    """Returns [n, H, L] in one pass over the context, with a limited number of blocks at a time."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    count, heads, size = query.shape
    block_size, end = cache.shape[1], span.context + count
    flat = query.reshape(count * heads, size).to(wide)
    tokens = max(_FEWEST_TOKENS, _MOST_SCORES // len(flat))
    step = -(-tokens // block_size) * block_size
    blocks = block_table[span.request, : -(-end // block_size)].long()
    hidden = ~span.mask
    best = total = attended = torch.empty(0)
    for start in range(0, end, step):
        stop = min(end, start + step)
        pages = blocks[start // block_size : -(-stop // block_size)]
        rows = cache.index_select(0, pages).view(-1, size)[: stop - start].to(wide)
        scores = (flat @ rows.t()).mul_(scale)
        if stop > span.context:
            own = max(span.context, start)
            columns = hidden[:, own - span.context : stop - span.context]
            at = scores.view(count, heads, -1)[:, :, own - start :]
            at.masked_fill_(columns[:, None], float("-inf"))
        values = rows[:, :value_size]
        if start == 0:
            # Every row attends slot 0, so no maximum is -inf from here on.
            best = scores.amax(1, keepdim=True)
            weights = scores.sub_(best).exp_()
            total = weights.sum(1, keepdim=True)
            attended = weights @ values
            continue
        larger = torch.maximum(best, scores.amax(1, keepdim=True))
        shrink = (best - larger).exp_()
        weights = scores.sub_(larger).exp_()
        total = total * shrink + weights.sum(1, keepdim=True)
        attended.mul_(shrink).addmm_(weights, values)
        best = larger
    return attended.div_(total).view(count, heads, value_size).to(query.dtype)


def _attend_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    span: LatentSpan,
    block_table: torch.Tensor,
    scale: float,
    value_size: int,
) -> torch.Tensor:
    """The reference of `_attend`."""
    block_size, end = cache.shape[1], span.context + span.num_rows
    slots = torch.arange(end)
    rows = cache[block_table[span.request].long()[slots // block_size], slots % block_size]
    seen = torch.ones(span.num_rows, end, dtype=torch.bool)
    seen[:, span.context :] = span.mask
    out = dense_attention(
        query, rows[:, None], rows[:, None, :value_size], scale, query.shape[1], seen
    )
    return out.to(query.dtype)


def move_latents(
    # each [num_blocks, block_size, D]
    caches: Sequence[torch.Tensor],
    # [P] int64
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
) -> None:
    """Moves the rows of slots src_slots[i] to dst_slots[i], in all layers.

    All are read before any is written. A slot may be twice in `dst_slots` with the same source.
    """
    for cache in caches:
        rows = cache.view(-1, cache.shape[-1])
        rows[dst_slots] = rows[src_slots]
