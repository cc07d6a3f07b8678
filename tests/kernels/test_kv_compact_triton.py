# SPDX-License-Identifier: Apache-2.0
"""Compaction of accepted paths in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from vllm_specplug.kernels.kv_compact_triton import (
    LayerCaches,
    compact_paths_triton,
)

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_compaction_gathers_every_layers_paths(dtype):
    page, heads, head_dim, layers = 8, 3, 5, 2
    paths = [[0, 1, 2], [0, 2, 5, 6, 11], [3], [], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    contexts = [5, 6, 0, 40, 15]
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randperm(len(paths) * 7 + 1, generator=draw)[: len(paths) * 7].view(-1, 7).int()
    shape = (blocks.numel() + 1, page, heads, 2 * head_dim)
    caches = [
        torch.randint(0, 100, shape, generator=draw).to(dtype).transpose(1, 2)
        for _ in range(layers)
    ]
    expected = [c.clone() for c in caches]
    moves = 0
    for path, context, row in zip(paths, contexts, blocks.tolist(), strict=True):
        for place, node in enumerate(path):
            (target, to), (source, at) = (
                divmod(context + 1 + index, page) for index in (place, node)
            )
            moves += place != node
            for cache, before in zip(expected, caches, strict=True):
                cache[row[target], :, to] = before[row[source], :, at]
    assert moves > 10

    padded = torch.zeros(len(paths), 9, dtype=torch.int32)
    for r, path in enumerate(paths):
        padded[r, : len(path)] = torch.tensor(path, dtype=torch.int32)
    # Requests come in another order than their rows of the block table.
    order = torch.tensor([3, 0, 4, 1, 2])
    compact_paths_triton(
        LayerCaches.of([tuple(c.transpose(1, 2).split(head_dim, dim=-1)) for c in caches]),
        padded[order],
        torch.tensor([len(p) for p in paths], dtype=torch.int32)[order],
        torch.tensor(contexts, dtype=torch.int32)[order],
        order.int(),
        blocks,
    )
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


def test_compaction_of_transposed_keys():
    """As vLLM's CPU cache has them: keys [Dh, page], values [page, Dh], in one block and head."""
    page, head_dim = 8, 4
    cache = torch.randn(4, 2, page, 2 * head_dim)
    halves = cache.view(4, 2, 2, page * head_dim)
    key = halves[:, :, 0].unflatten(-1, (head_dim, page)).permute(0, 3, 1, 2)
    value = halves[:, :, 1].unflatten(-1, (page, head_dim)).transpose(1, 2)
    before = [key.clone(), value.clone()]
    one = torch.tensor([3], dtype=torch.int32)
    compact_paths_triton(
        LayerCaches.of([(key, value)]), torch.tensor([[0, 2, 5]]).int(), one, one * 2,
        one * 0, torch.tensor([[2, 0, 1]]).int(),
    )  # fmt: skip
    for half, old in zip((key, value), before, strict=True):
        # Context 6: nodes 2 and 5 stand at positions 9 and 12, and go to 8 and 9.
        old[0, 0], old[0, 1] = old[0, 1].clone(), old[0, 4].clone()
        assert torch.equal(half, old)


def test_paths_of_one_node():
    """One column: its stride is whatever made it."""
    cache = torch.arange(2 * 8 * 4.0).view(2, 8, 1, 4)
    key, value = cache.split(2, dim=-1)
    wanted = cache.clone()
    wanted[0, 1], wanted[1, 3] = cache[0, 4], cache[1, 5]
    pair = torch.tensor([1, 1], dtype=torch.int32)
    compact_paths_triton(
        LayerCaches.of([(key, value)]), torch.tensor([[3, 2]]).int().t(), pair,
        torch.tensor([0, 2]).int(), torch.tensor([0, 1]).int(), torch.tensor([[0], [1]]).int(),
    )  # fmt: skip
    assert torch.equal(cache, wanted)


def test_layers_of_different_shape_are_refused():
    caches = [(torch.zeros(2, 8, 1, n), torch.zeros(2, 8, 1, n)) for n in (4, 6)]
    with pytest.raises(ValueError, match="one shape, stride and dtype"):
        LayerCaches.of(caches)
