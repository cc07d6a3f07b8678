# SPDX-License-Identifier: Apache-2.0
"""Partial caches against a plain list of every token's keys and values."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.kernels.cpu_layout import make_layout, standard_tables
from vllm_specplug.vllm_worker.memory.partial_cache import RECENT, PartialCache

LAYERS, BLOCKS, HEADS, BLOCK, DIM = 2, 24, 2, 32, 32
BUDGET, SINK = 80, 5


@pytest.fixture
def layout():
    return make_layout(standard_tables("vec", BLOCK, DIM), "test", torch.float32)


@pytest.fixture
def caches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BLOCKS, HEADS, BLOCK, 2 * DIM, generator=generator) for _ in range(LAYERS)]


def _pool(caches, layout, requests=2):
    return PartialCache(caches, layout, BUDGET, SINK, requests)


def _keys(layout, cache, slots):
    """Keys of slots, [T, Hkv, Dh]."""
    return layout.gather(*layout.views(cache), torch.as_tensor(slots))[0]


def _row(*blocks):
    return torch.tensor(blocks, dtype=torch.int32)


def _slots(row, positions):
    positions = torch.as_tensor(positions)
    return row.long()[positions // BLOCK] * BLOCK + positions % BLOCK


def _query():
    return torch.randn(3 * HEADS, DIM, generator=torch.Generator().manual_seed(9))


def _choose_all(pool, context, row):
    return [pool.choose(layer, context, _query(), row) for layer in range(LAYERS)]


def test_keeps_the_sink_the_recent_and_the_most_important(caches, layout) -> None:
    pool, row, length = _pool(caches, layout), _row(7, 2, 9, 4, 11, 0, 1), 200
    context, due = pool.advance("a", length, row)
    assert due
    chosen = _choose_all(pool, context, row)
    for layer, positions in enumerate(chosen):
        keys = _keys(layout, caches[layer], _slots(row, range(length)))
        scores = torch.einsum("hgd,thd->ht", _query().view(HEADS, 3, DIM), keys)
        for head in range(HEADS):
            kept = positions[head].tolist()
            assert len(set(kept)) == BUDGET
            assert kept[:SINK] == list(range(SINK))
            recent = range(length - RECENT, length)
            assert set(recent) <= set(kept)
            rest = [p for p in kept[SINK:] if p not in recent]
            ranked = scores[head, SINK : length - RECENT].argsort(descending=True) + SINK
            assert rest == ranked[: len(rest)].tolist()
            # What lies in the pool is what was chosen.
            region = pool.block_table[context.index]
            stored = _keys(layout, pool.caches[layer], _slots(region, range(BUDGET)))[:, head]
            assert torch.equal(stored, keys[positions[head], head])


def test_new_tokens_replace_the_tail_until_the_choice_is_due_again(caches, layout) -> None:
    pool, row = _pool(caches, layout), _row(7, 2, 9, 4, 11, 0, 1)
    context, _ = pool.advance("a", 100, row)
    chosen = _choose_all(pool, context, row)[0]
    assert pool.advance("a", 103, row) == (context, False)
    region = pool.block_table[context.index]
    stored = _keys(layout, pool.caches[0], _slots(region, range(BUDGET)))
    new = _keys(layout, caches[0], _slots(row, [102, 101, 100]))
    assert torch.equal(stored[-3:], new)
    # The rest is untouched.
    keys = _keys(layout, caches[0], _slots(row, range(100)))
    assert torch.equal(stored[:-3, 1], keys[chosen[1, :-3], 1])
    # The tail may be eaten up to the sink, not into it.
    assert pool.advance("a", 100 + BUDGET - SINK, row)[1] is False
    stored = _keys(layout, pool.caches[0], _slots(region, range(SINK)))
    assert torch.equal(stored, keys[:SINK])
    assert pool.advance("a", 101 + BUDGET - SINK, row)[1] is True


def test_memory_is_bounded_and_whoever_was_dropped_chooses_anew(caches, layout) -> None:
    pool = _pool(caches, layout)
    # Float32 keys and values of two requests; 80 tokens take 3 pages of 32.
    expected = LAYERS * 2 * 96 * HEADS * 2 * DIM * 4
    assert sum(cache.nbytes for cache in pool.caches) == expected
    row = _row(7, 2, 9, 4, 11, 0, 1)
    for req_id in ("a", "b", "a", "c"):
        pool.advance(req_id, 100, row)
    assert sum(cache.nbytes for cache in pool.caches) == expected
    regions = {pool.advance(r, 100, row)[0].index for r in ("a", "c")}
    assert len(regions) == 2
    assert pool.advance("a", 100, row)[1] is False
    assert pool.advance("b", 100, row)[1] is True  # had made room for c
    pool.forget(["b", "nobody"])
    assert pool.advance("b", 100, row)[1] is True  # preempted, say


def test_a_context_that_went_back_is_chosen_anew(caches, layout) -> None:
    pool, row = _pool(caches, layout), _row(7, 2, 9, 4, 11, 0, 1)
    pool.advance("a", 150, row)
    assert pool.advance("a", 149, row)[1] is True
