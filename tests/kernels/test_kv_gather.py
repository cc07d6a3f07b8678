# SPDX-License-Identifier: Apache-2.0
"""Copies between caches and key scores, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.paged import layout_of
from vllm_specplug.kernels import gather_kv, key_scores
from vllm_specplug.kernels.kv_gather import gather_kv_reference

LAYERS, BLOCKS, HEADS, BLOCK, DIM = 3, 5, 2, 32, 32


@pytest.fixture(params=[("vec", torch.float32), ("vnni", torch.bfloat16), ("table", torch.float32)])
def layout(request):
    return layout_of(*request.param, BLOCK, DIM)


def _caches(layout, blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, blocks, HEADS, BLOCK, 2 * DIM)
    return list(torch.randn(shape, generator=generator).to(layout.dtype).unbind(0))


def _token(layout, cache, head, slot):
    """K and V of one token, by the layout's own gather."""
    key, value = layout.gather(*layout.views(cache), torch.tensor([slot]))
    return key[0, head], value[0, head]


@pytest.mark.parametrize("shared", [True, False], ids=["one list", "list per layer and head"])
def test_tokens_arrive_where_they_were_sent(layout, shared) -> None:
    src = _caches(layout, BLOCKS, 0)
    shape = (1, 1, 7) if shared else (LAYERS, HEADS, 7)
    slots = torch.randint(0, BLOCKS * BLOCK, shape, generator=torch.Generator().manual_seed(3))
    dst_slots = torch.tensor([63, 0, 5, 33, 32, 6, 40])
    dst, expected = _caches(layout, 2, 2), _caches(layout, 2, 2)
    gather_kv(src, dst, slots, dst_slots, layout)
    gather_kv_reference(src, expected, slots, dst_slots, layout)
    full = slots.expand(LAYERS, HEADS, 7)
    for layer in range(LAYERS):
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


def test_refuses_slots_outside() -> None:
    layout = layout_of("vec", torch.float32, BLOCK, DIM)
    src, dst = _caches(layout, BLOCKS, 0), _caches(layout, 2, 2)
    inside, outside = torch.zeros(1, 1, 1, dtype=torch.int64), torch.tensor([2 * BLOCK])
    with pytest.raises(RuntimeError, match="destination slot 64"):
        gather_kv(src, dst, inside, outside, layout)
    with pytest.raises(RuntimeError, match="source slot 160"):
        gather_kv(src, dst, inside + BLOCKS * BLOCK, outside - 1, layout)


def test_scores_are_sums_over_the_query_group(layout) -> None:
    key_cache, value_cache = layout.views(_caches(layout, BLOCKS, 0)[0])
    query = torch.randn(3 * HEADS, DIM, generator=torch.Generator().manual_seed(5))
    blocks = torch.tensor([4, 1, 2])
    scores = key_scores(query.to(layout.dtype), key_cache, blocks, layout)
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    keys = layout.gather(key_cache, value_cache, slots)[0].float()  # [T, Hkv, Dh]
    grouped = query.to(layout.dtype).float().view(HEADS, 3, DIM)
    expected = torch.einsum("hgd,thd->ht", grouped, keys)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)
