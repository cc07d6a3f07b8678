# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.paged import layout_of, num_threads, write_slots
from tests.kernels.tree_problem import path_of, random_parents
from vllm_specplug.kernels import copy_kv
from vllm_specplug.kernels.reference import copy_kv_reference

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LAYOUTS = [
    (FP32, "vec"),
    (FP16, "vec"),
    (BF16, "vec"),
    (BF16, "vnni"),
    (FP32, "table"),
    (BF16, "table"),
]


def compact(caches, src, dst, layout, copy=copy_kv):
    """Moves slots inside the caches of all layers and heads."""
    slots = torch.tensor(src, dtype=torch.int64).view(1, 1, -1)
    copy(caches, caches, slots, torch.tensor(dst, dtype=torch.int64), layout)


def decode_and_compact(layout, requests, copy=copy_kv, layers=3, heads=2, seed=0, threads=1):
    """Writes trees at their slots, compacts the accepted paths, and compares with caches that
    were decoded token by token. requests: (context, parents, accepted row)."""
    generator = torch.Generator().manual_seed(seed)
    size = layout.block_size
    per_request = max(-(-(c + len(p) + 1) // size) for c, p, _ in requests)
    num_blocks = per_request * len(requests) + 1
    table = torch.randperm(num_blocks, generator=generator)[:-1].view(len(requests), per_request)
    shape = (num_blocks, heads, size, 2 * layout.head_size)
    caches = [torch.zeros(shape, dtype=layout.dtype) for _ in range(layers)]
    decoded = [torch.zeros(shape, dtype=layout.dtype) for _ in range(layers)]
    kept, src, dst = [], [], []
    for r, (context, parents, accepted) in enumerate(requests):
        rows = len(parents) + 1
        positions = torch.arange(context + rows)
        slots = table[r][positions // size] * size + positions % size
        path = path_of(parents, accepted)
        for layer in range(layers):
            key, value = torch.randn(
                2, context + rows, heads, layout.head_size, generator=generator
            ).to(layout.dtype)
            write_slots(layout, caches[layer], slots, key, value)
            order = [*range(context), *(context + j for j in path)]
            write_slots(layout, decoded[layer], slots[: len(order)], key[order], value[order])
        kept += slots[: context + len(path)].tolist()
        # Row 0 is in place; the k-th accepted node moves to the k-th slot after it.
        src += [int(slots[context + j]) for j in path[1:]]
        dst += [int(slots[context + k + 1]) for k in range(len(path) - 1)]
    untouched = set(range(num_blocks * size)) - set(dst)
    before = [c.clone() for c in caches]
    with num_threads(threads):
        compact(caches, src, dst, layout, copy)
    for layer in range(layers):
        for part in range(2):
            for slots, other in ((kept, decoded[layer]), (sorted(untouched), before[layer])):
                index = torch.tensor(slots).long()
                actual = layout.gather(*layout.views(caches[layer]), index)[part]
                assert torch.equal(actual, layout.gather(*layout.views(other), index)[part])


@pytest.mark.parametrize("copy", [copy_kv, copy_kv_reference])
@pytest.mark.parametrize(("dtype", "kind"), LAYOUTS)
@pytest.mark.parametrize("block_size", [32, 64])
def test_equals_a_cache_decoded_token_by_token(copy, dtype, kind, block_size):
    rng = np.random.default_rng(0)
    requests = []
    for context, nodes in ((0, 3), (30, 16), (63, 70), (64, 9)):
        parents = random_parents(nodes, rng)
        deepest = max(range(nodes + 1), key=lambda row, p=parents: len(path_of(p, row)))
        requests.append((context, parents, deepest))
    decode_and_compact(layout_of(kind, dtype, block_size, 32), requests, copy)


@pytest.mark.parametrize(("dtype", "kind"), LAYOUTS)
def test_overlapping_paths(dtype, kind):
    """Sources that are destinations of earlier moves: 2->1, 3->2, 5->3, 6->4."""
    parents = np.array([-1, -1, 1, 0, 2, 4], dtype=np.int32)  # row 6's path: 0, 2, 3, 5, 6
    assert path_of(parents, 6) == [0, 2, 3, 5, 6]
    decode_and_compact(layout_of(kind, dtype, 32, 64), [(29, parents, 6)])


def test_no_moves_is_nothing():
    layout = layout_of("vec", FP32, 32, 32)
    cache = torch.randn(2, 1, 32, 64)
    before = cache.clone()
    compact([cache], [], [], layout)
    compact([cache], [5], [5], layout)
    assert torch.equal(cache, before)


def test_slots_outside_the_cache_are_refused(compiled):
    layout = layout_of("vec", FP32, 32, 32)
    with pytest.raises(RuntimeError, match="source slot 64 is outside 64 slots"):
        compact([torch.zeros(2, 1, 32, 64)], [64], [3], layout)
    with pytest.raises(RuntimeError, match="destination slot 64 is outside 64 slots"):
        compact([torch.zeros(2, 1, 32, 64)], [3], [64], layout)


@settings(max_examples=30)
@given(st.integers(0, 70), st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([1, 2]))
def test_random_paths(context, nodes, seed, threads):
    rng = np.random.default_rng(seed)
    parents = random_parents(nodes, rng)
    row = int(rng.integers(0, nodes + 1))
    layout = layout_of("vnni", BF16, 32, 32)
    decode_and_compact(layout, [(context, parents, row)], threads=threads)


BLOCKS, HEADS, BLOCK = 5, 2, 32


def _caches(layout, blocks, seed):
    shape = (3, blocks, HEADS, BLOCK, 2 * layout.head_size)
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(shape, generator=generator).to(layout.dtype).unbind(0))


def _token(layout, cache, head, slot):
    """K and V of one token, by the layout's own gather."""
    key, value = layout.gather(*layout.views(cache), torch.tensor([slot]))
    return key[0, head], value[0, head]


@pytest.mark.parametrize("shared", [True, False], ids=["one list", "list per layer and head"])
@pytest.mark.parametrize(("dtype", "kind"), LAYOUTS)
def test_tokens_arrive_where_they_were_sent(dtype, kind, shared):
    layout = layout_of(kind, dtype, BLOCK, 32)
    src = _caches(layout, BLOCKS, 0)
    shape = (1, 1, 7) if shared else (3, HEADS, 7)
    slots = torch.randint(0, BLOCKS * BLOCK, shape, generator=torch.Generator().manual_seed(3))
    dst_slots = torch.tensor([63, 0, 5, 33, 32, 6, 40])
    dst, expected = _caches(layout, 2, 2), _caches(layout, 2, 2)
    copy_kv(src, dst, slots, dst_slots, layout)
    copy_kv_reference(src, expected, slots, dst_slots, layout)
    full = slots.expand(3, HEADS, 7)
    for layer in range(3):
        assert torch.equal(dst[layer], expected[layer])
        for head in range(HEADS):
            for i in range(7):
                sent = _token(layout, src[layer], head, int(full[layer, head, i]))
                got = _token(layout, dst[layer], head, int(dst_slots[i]))
                assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))
    # Nothing else was touched.
    untouched = _caches(layout, 2, 2)
    for slot in set(range(2 * BLOCK)) - set(dst_slots.tolist()):
        before, after = _token(layout, untouched[0], 1, slot), _token(layout, dst[0], 1, slot)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
