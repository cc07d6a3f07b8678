# SPDX-License-Identifier: Apache-2.0
"""Windows of drafting: what a ring holds, whom it serves, and that it never grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.dense_trees import tree_attention
from vllm_specplug.drafting.caches import TargetCacheSpec, WindowSpec
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels.reference import dense_attention
from vllm_specplug.vllm_attention.cpu import cpu_kv_layout
from vllm_specplug.vllm_worker.memory.window_cache import (
    PagedTargetCache,
    WindowCache,
    window_bytes,
)

pytestmark = pytest.mark.usefixtures("vllm_kernels")

HEADS, DIM = 2, 32
SIZE = 40


def key_of(token: int, position: int) -> torch.Tensor:
    """A key [Hkv, Dh] that names its token and position."""
    generator = torch.Generator().manual_seed(1000 * token + position)
    return torch.randn(HEADS, DIM, generator=generator)


def requests(lengths: dict[str, int], seed: int = 0) -> DraftRequests:
    made = DraftRequests()
    for i, (req_id, length) in enumerate(lengths.items()):
        tokens = np.random.default_rng([seed, len(req_id), ord(req_id[0])]).integers(0, 50, 4000)
        made.req_ids.append(req_id)
        made.token_ids.append(tokens[: length + 1])
        made.context_lens.append(length)
        made.req_indices.append(i)
    return made


def fill(cache: WindowCache, asked: DraftRequests) -> int:
    missing = cache.missing(asked)
    pairs = list(zip(missing.token_ids.tolist(), missing.positions.tolist(), strict=True))
    if pairs:
        keys = torch.stack([key_of(*pair) for pair in pairs])
        cache.write(keys, -keys, missing.slots)
    return len(pairs)


def check(cache: WindowCache, asked: DraftRequests, parents: list[np.ndarray]) -> None:
    """Attention over the rings equals dense attention over the last `SIZE` tokens."""
    torch.manual_seed(1)
    count = sum(len(p) + 1 for p in parents)
    query = torch.randn(count, 2 * HEADS, DIM)
    key, value = torch.randn(2, count, HEADS, DIM)
    contexts = []
    for tokens, end in zip(asked.token_ids, asked.context_lens, strict=True):
        window = [key_of(int(tokens[p]), p) for p in range(max(0, end - SIZE), end)]
        stacked = torch.stack(window) if window else torch.empty(0, HEADS, DIM)
        contexts.append((stacked, -stacked))
    expected = tree_attention(query, key, value, contexts, parents)
    lengths = torch.tensor(asked.context_lens)
    output = cache.tree_attention(asked, lengths, parents)(query, key, value)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


PARENTS = [np.array([-1, -1, 0, 2], np.int32), np.array([], np.int32), np.array([-1], np.int32)]


def test_a_ring_holds_exactly_the_last_tokens_as_requests_grow() -> None:
    cache = WindowCache(WindowSpec(SIZE, HEADS, DIM), 3, torch.float32)
    lengths = {"a": 3, "b": 0, "c": 39}
    for step in range(40):
        asked = requests(lengths)
        written = fill(cache, asked)
        # The first time a prompt's window, afterwards only what was committed in between.
        assert written == (42 if step == 0 else 1 + 3 + 7)
        check(cache, asked, PARENTS)
        lengths = {"a": lengths["a"] + 1, "b": lengths["b"] + 3, "c": lengths["c"] + 7}


def test_a_long_prompt_costs_its_window_alone_and_memory_stays() -> None:
    spec = WindowSpec(SIZE, HEADS, DIM)
    cache = WindowCache(spec, 1, torch.float32)
    before = cache.kv_cache.nbytes
    assert before == window_bytes(spec, 1, torch.float32)
    asked = requests({"a": 3900})
    assert fill(cache, asked) == SIZE
    check(cache, asked, PARENTS[:1])
    assert cache.kv_cache.nbytes == before


def test_a_request_that_lost_its_ring_gets_it_back_from_its_tokens() -> None:
    cache = WindowCache(WindowSpec(SIZE, HEADS, DIM), 2, torch.float32)
    first, second, third = (requests({name: 60}) for name in "abc")
    for asked in (first, second, third):
        assert fill(cache, asked) == SIZE  # the third takes the ring of the first
    again = requests({"a": 61})
    assert fill(cache, again) == SIZE
    check(cache, again, PARENTS[:1])
    assert fill(cache, requests({"c": 62})) == 2
    assert set(cache.regions) == {"a", "c"} and not cache.free


def test_a_batch_as_large_as_the_cache_shares_no_ring() -> None:
    cache = WindowCache(WindowSpec(SIZE, HEADS, DIM), 3, torch.float32)
    fill(cache, requests({"x": 10, "y": 10, "z": 10}))
    asked = requests({"a": 50, "b": 7, "c": 90})
    fill(cache, asked)
    assert len({ring.index for ring in cache.regions.values()}) == 3
    check(cache, asked, PARENTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5, 40, 64])
def test_rows_attend_the_end_of_a_context_of_the_target(
    window: int | None, dtype: torch.dtype
) -> None:
    """Pages behind a window may be another request's."""
    from vllm import _custom_ops as ops

    torch.manual_seed(2)
    page, lengths, rows = 32, [0, 1, 5, 33, 40, 41, 100, 128], [2, 1, 70, 3, 1, 4, 2, 5]
    blocks = 4
    cache = torch.full((1 + blocks * len(lengths), HEADS, page, 2 * DIM), torch.nan, dtype=dtype)
    table = 1 + torch.arange(len(cache) - 1, dtype=torch.int32).view(len(lengths), blocks)
    layout = cpu_kv_layout(cache)
    views = layout.views(cache)
    stored = []
    for line, length in zip(table, lengths, strict=True):
        key, value = torch.randn(2, length, HEADS, DIM).to(dtype)
        at = torch.arange(length)
        slots = line[at // page].long() * page + at % page
        # The slots of a page that are not written yet hold anything but NaN.
        cache[line.long()] = 0.0
        ops.cpu_attn_reshape_and_cache(key, value, *views, slots, layout.isa)
        stored.append((key, value))
        line[: max(0, length - (window or length)) // page] = 0
    asked = [7, 0, 3, 2, 6, 4, 5, 1]
    spec = TargetCacheSpec(HEADS, DIM, 0.3, window)
    contexts, counts = (torch.tensor([column[i] for i in asked]) for column in (lengths, rows))
    attend = PagedTargetCache(cache, lambda: table, spec).level_attention(
        DraftRequests(req_indices=asked),
        contexts,
        torch.arange(len(asked)).repeat_interleave(counts),
    )
    query = torch.randn(sum(rows), 2 * HEADS, DIM).to(dtype)
    output = attend(query)
    start = 0
    for i in asked:
        part = slice(start, start + rows[i])
        key, value = (x[max(0, lengths[i] - (window or lengths[i])) :] for x in stored[i])
        expected = dense_attention(query[part], key, value, 0.3, 2, None)
        near = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(output[part].float(), expected, atol=near, rtol=near)
        start += rows[i]
