# SPDX-License-Identifier: Apache-2.0
"""Attention of drafted branches over a draft layer's pages equals dense attention."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.unit.dense_trees import tree_attention
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels.reference import dense_attention
from vllm_specplug.vllm_worker.memory.draft_cache import PagedDraftCache

pytestmark = pytest.mark.usefixtures("vllm_kernels")

HEADS, DIM, BLOCK = 2, 32, 32
# Of each request: slots of its context, and the pages that hold them.
CONTEXTS, PAGES = [0, 5, 32, 70], [[7, 0, 0], [3, 0, 0], [1, 5, 0], [6, 2, 4]]
WINDOWS = [None, 3, 20, 70]
PARENTS = [[-1, -1, 0, 2], [], [-1], [-1, 0, 1, -1, 3, 0]]


def filled_cache() -> tuple[PagedDraftCache, torch.Tensor, torch.Tensor]:
    """A cache of a layer for each window, and its keys and values [layer, request, position, Hkv,
    Dh]."""
    torch.manual_seed(0)
    layers = [
        SimpleNamespace(
            kv_cache=torch.full((8, HEADS, BLOCK, 2 * DIM), float("nan")),
            spec=SimpleNamespace(window=window),
        )
        for window in WINDOWS
    ]
    table = torch.tensor(PAGES, dtype=torch.int32)
    cache = PagedDraftCache(layers, lambda: table, DIM**-0.5)  # type: ignore[arg-type]
    keys, values = torch.randn(2, len(WINDOWS), 4, 96, HEADS, DIM)
    for r, length in enumerate(CONTEXTS):
        at = torch.arange(length)
        slots = table[r, at // BLOCK].long() * BLOCK + at % BLOCK
        assert cache.slots(r, length).tolist() == slots.tolist()
        cache.write(keys[:, r, :length], values[:, r, :length], slots)
    return cache, keys, values


def test_branches_attend_their_pages_and_their_ancestors() -> None:
    """Of a layer with a window, the last of them: 3 positions are fewer than a branch has."""
    cache, keys, values = filled_cache()
    # Not all requests of the batch draft, and not in its order.
    chosen = [3, 0, 2, 1]
    requests = DraftRequests(req_indices=chosen, token_ids=[np.zeros(1)] * 4)
    parents = [np.array(PARENTS[r], np.int32) for r in chosen]
    lengths = torch.tensor([CONTEXTS[r] for r in chosen])
    attention = cache.tree_attention(requests, lengths, parents)
    count = sum(len(p) + 1 for p in parents)
    for layer, window in enumerate(WINDOWS):
        query = torch.randn(count, 2 * HEADS, DIM)
        key, value = torch.randn(2, count, HEADS, DIM)
        contexts = [tuple(x[layer, r, : CONTEXTS[r]] for x in (keys, values)) for r in chosen]
        expected = tree_attention(query, key, value, contexts, parents, window)
        output = attention(layer, query, key, value)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def test_committed_tokens_attend_the_tokens_before_them() -> None:
    """Rows of two requests in one batch."""
    cache, keys, values = filled_cache()
    places = [(1, 0), (3, 64), (1, 4), (3, 3), (1, 2), (3, 69)]
    rows, positions = (torch.tensor(column) for column in zip(*places, strict=True))
    attention = cache.context_attention(rows.int(), positions, torch.arange(len(places)))
    for layer, window in enumerate(WINDOWS):
        query = torch.randn(len(places), 2 * HEADS, DIM)
        key, value = keys[layer, rows, positions], values[layer, rows, positions]
        output = attention(layer, query, key, value)
        for i, (r, at) in enumerate(places):
            seen = slice(max(0, at + 1 - (window or at + 1)), at + 1)
            expected, _ = dense_attention(
                query[i : i + 1], keys[layer, r, seen], values[layer, r, seen], DIM**-0.5, 2,
                torch.ones(1, seen.stop - seen.start, dtype=torch.bool),
            )  # fmt: skip
            torch.testing.assert_close(output[i : i + 1], expected, atol=2e-5, rtol=2e-5)
