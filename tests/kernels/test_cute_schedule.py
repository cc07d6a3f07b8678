# SPDX-License-Identifier: Apache-2.0
"""How evenly the CuTe kernel's schedule cuts batches, simulated; not a measurement."""

from __future__ import annotations

import random

import pytest

from tests.kernels.cute_schedule import Part, makespan, share_of, slots_of
from vllm_specplug.kernels.cute.config import MIN_SPLIT_TILES, TILE_N
from vllm_specplug.kernels.cute.launch import Shares, share_out

MULTIPROCESSORS = 132
KV_HEADS = 8


def tiles_of(contexts: list[int], rows: int = 16) -> list[int]:
    return [-(-(context + rows) // TILE_N) for context in contexts]


def simulate(
    tiles: list[int], *, row_blocks: int = 1, places: int = 2 * MULTIPROCESSORS
) -> tuple[list[Part], float, float]:
    """Parts, the largest beside the mean one, and the makespan beside an even share of a place."""
    blocks = KV_HEADS * row_blocks
    bound = 1 << (max(tiles) - 1).bit_length()
    parts = slots_of(tiles, share_out(len(tiles), blocks, bound, places, None))
    sizes = [part.size for part in parts]
    even = max(sum(tiles) * blocks / places, MIN_SPLIT_TILES)
    return parts, max(sizes) * len(sizes) / sum(sizes), makespan(parts, blocks, places) / even


SKEWED = [1000] * 31 + [100_000]


@pytest.mark.parametrize("contexts", [SKEWED, SKEWED[::-1]])
def test_one_long_context_among_short_ones(contexts):
    parts, slowest, longest = simulate(tiles_of(contexts))
    assert slowest <= 1.3
    # Parts of a fifth of a place's work: the last ones overhang.
    assert longest <= 1.25
    assert {part.tree for part in parts} == set(range(32))


def test_the_simulation_notices_splits_of_the_grid():
    """The control: every tree in as many parts as any other."""
    tiles = tiles_of(SKEWED)
    for splits in (1, 4):
        parts = [
            Part(tree, count * i // splits, count * (i + 1) // splits)
            for tree, count in enumerate(tiles)
            for i in range(splits)
        ]
        assert max(p.size for p in parts) * len(parts) / sum(tiles) > 10
        even = sum(tiles) * KV_HEADS / (2 * MULTIPROCESSORS)
        assert makespan(parts, KV_HEADS, 2 * MULTIPROCESSORS) > 5 * even


def test_even_batches_are_cut_evenly():
    for trees in (1, 2, 5, 16, 32, 64):
        for context in (1000, 4000, 32_000):
            parts, slowest, longest = simulate(tiles_of([context] * trees))
            assert slowest <= 1.3 and longest <= 2.1, (trees, context, slowest, longest)
            assert len(parts) % trees == 0


def test_trees_of_many_rows():
    """Blocks of 192 rows: fewer parts, as partial results are larger."""
    _, slowest, longest = simulate(tiles_of(SKEWED, 65), row_blocks=2, places=MULTIPROCESSORS)
    assert slowest <= 2.5 and longest <= 1.2


@pytest.mark.parametrize("contexts", [SKEWED, SKEWED[::-1]])
def test_blocks_of_128_rows_one_a_multiprocessor(contexts):
    """31 nodes of G = 4 are one block, 63 two: parts are fewer then, and the device still full."""
    _, slowest, longest = simulate(tiles_of(contexts, 32), places=MULTIPROCESSORS)
    assert slowest <= 1.3 and longest <= 1.1
    _, _, longest = simulate(tiles_of(contexts, 64), row_blocks=2, places=MULTIPROCESSORS)
    assert longest <= 1.1


def batches():
    draw = random.Random(0)
    for _ in range(60):
        trees = draw.choice([1, 2, 3, 31, 32, 33, 70, 256])
        longest = draw.choice([1, 5, 40, 500, 3000])
        yield [draw.choice([0, 1, draw.randint(1, longest)]) for _ in range(trees)]


def test_any_batch_finds_its_slots():
    """Every tile once; slots and partial results suffice; no part outgrows its share."""
    for tiles in batches():
        for splits in (None, 2, 7):
            for places in (132, 264):
                shares = share_out(len(tiles), KV_HEADS, max(tiles) + 1, places, splits)
                parts = slots_of(tiles, shares)
                assert len(parts) <= shares.slots
                seen = [[] for _ in tiles]
                for part in parts:
                    assert part.size > 0
                    seen[part.tree] += range(part.begin, part.end)
                assert seen == [list(range(count)) for count in tiles]
                cut = [part for part in parts if part.size < tiles[part.tree]]
                assert len(cut) <= shares.parts
                if shares.parts:
                    share = share_of(tiles, shares)
                    assert all(4 * (part.size - 1) <= 5 * share for part in parts)


def test_few_tiles_are_left_whole():
    assert share_out(32, KV_HEADS, 16, 264, None) == Shares(32, 32, 0)
    assert share_out(1, KV_HEADS, 1, 264, None) == Shares(1, 1, 0)
    # an even batch that fills the device, but long enough that it may be uneven
    assert share_out(33, KV_HEADS, 512, 264, None).parts
