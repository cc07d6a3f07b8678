# SPDX-License-Identifier: Apache-2.0
"""How evenly the CuTe kernel's schedule cuts batches, simulated; not a measurement.

Times are tiles with the assumed costs of blocks and parts (`config.WHOLE_COST`, `config.CUT_COST`);
`resident_ctas` is the number of blocks that run at once.
"""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cute_schedule import (
    Batch,
    Part,
    makespan,
    mean_load,
    part_size_of,
    slots_of,
    tiles_of,
    up,
)
from vllm_specplug.kernels.cute.config import WAVES, ForwardConfig
from vllm_specplug.kernels.cute.launch import GridSplit, split_grid, warpgroups_for

# A100, H100, B200
MULTIPROCESSORS = (108, 132, 148)
SKEWED = [1000] * 31 + [100_000]
SKEWS = {
    "one long": SKEWED,
    "the long one first": SKEWED[::-1],
    "one very long": [4000] * 31 + [131_072],
    "several long": [1000] * 28 + [30_000, 60_000, 100_000, 130_000],
    "many short, several long": [500] * 60 + [30_000] * 4,
    "two sizes": [700] * 200 + [20_000] * 8,
    "a pair": [1000, 100_000],
    "both long": [100_000, 70_000],
    "few": [1000, 1000, 1000, 100_000],
    "each twice the one before": [500 << i for i in range(9)],
}
# (query heads a KV head, KV heads)
HEADS = [(1, 32), (3, 3), (4, 8), (4, 2), (7, 2), (8, 8), (8, 1)]


def batch_of(
    contexts: list[int],
    rows: int | list[int],
    group: int,
    heads: int,
    num_sms: int,
) -> Batch:
    """As a launch for these trees would have it, of rows each or all alike."""
    each = rows if isinstance(rows, list) else [rows] * len(contexts)
    config = ForwardConfig(128, "bfloat16", warpgroups_for(max(each) * group), 16)
    return Batch(
        [tiles_of(c, r) for c, r in zip(contexts, each, strict=True)],
        [up(r * group, config.tile_m) for r in each],
        heads,
        num_sms * config.ctas_per_sm,
    )


def unevenness(batch: Batch, parts: list[Part]) -> float:
    """The busiest place beside the mean one."""
    return makespan(batch, parts) / mean_load(batch, parts)


def simulate(batch: Batch) -> float:
    return unevenness(batch, slots_of(batch, batch.grid_split()))


def cut(batch: Batch, parts: int) -> list[Part]:
    """Every tree in so many parts."""
    return [
        Part(tree, count * i // parts, count * (i + 1) // parts, parts > 1)
        for tree, count in enumerate(batch.tiles)
        for i in range(parts)
    ]


def skews() -> list[tuple[str, Batch]]:
    """Long contexts among short ones; trees of unlike rows, of which the last has the most."""
    made = [
        (f"{name}, {rows} rows", batch_of(contexts, each, *model))
        for name, contexts in SKEWS.items()
        for rows in (16, 32, 64, 128, 256)
        for each in (rows, [max(1, rows >> (i % 5)) for i in range(len(contexts))][::-1])
        for model in itertools.product(*zip(*HEADS, strict=True), MULTIPROCESSORS)
        if model[:2] in HEADS
    ]
    # The simulation of more blocks takes seconds.
    return [(name, b) for name, b in made if sum(b.row_blocks) * b.heads <= 8_000]


def even_share(batch: Batch) -> float:
    """Tiles of a place, without costs."""
    return batch.work * batch.heads / batch.resident_ctas


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Contexts of up to three magnitudes, trees of unlike rows, models and devices."""
    contexts: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        most = draw(st.sampled_from([100, 1000, 4000, 30_000, 131_072]))
        lengths = st.integers(0, most)
        each = draw(st.lists(lengths, min_size=1, max_size=draw(st.sampled_from([1, 4, 40]))))
        contexts += each if draw(st.booleans()) else each[:1] * len(each)
    contexts = draw(st.permutations(contexts))
    most_rows = draw(st.sampled_from([1, 16, 32, 64, 128, 257]))
    rows: int | list[int] = most_rows
    if draw(st.booleans()):
        each_rows = st.integers(0, most_rows)
        rows = [draw(each_rows) for _ in contexts]
        rows[draw(st.integers(0, len(rows) - 1))] = most_rows
    group, heads = draw(st.sampled_from(HEADS))
    num_sms = draw(st.sampled_from(MULTIPROCESSORS))
    return batch_of(contexts, rows, group, heads, num_sms)


# Below, the costs of blocks and parts rule, and no size of parts is even.
ENOUGH = 64


def test_skewed_batches_keep_all_places_busy():
    """The busiest place takes at most 1.3 times the mean: in every batch of many short and one or
    several long contexts, and in 99 of 100 where two or a few trees are all there is. There, equal
    parts may come to a little more than whole waves of blocks."""
    ratios = {}
    for name, batch in skews():
        if even_share(batch) >= ENOUGH:
            key = (name, batch.heads, batch.resident_ctas, *batch.row_blocks)
            ratios[key] = simulate(batch)
    assert len(ratios) > 1000
    over = [key[0].split(",")[0] for key, ratio in ratios.items() if ratio > 1.3]
    many = {"one long", "the long one first", "several long", "many short", "two sizes"}
    assert not many & set(over), over
    assert len(over) < 0.01 * len(ratios) and max(ratios.values()) < 1.35


def test_the_simulation_notices_splits_of_the_grid():
    """The control: every tree in as many parts as any other."""
    batch = batch_of(SKEWED, 16, 4, 8, 132)
    for splits in (1, 4):
        assert unevenness(batch, cut(batch, splits)) > 3


def test_even_batches_take_about_the_fewest_tiles_of_any_cut():
    """Whole trees that fill the device once are not cut: on an H100 eight of 65 rows over 4,096
    tokens took a quarter longer in parts."""
    ratios = {}
    cells = itertools.product((1000, 4000, 16_000), (2, 4, 8, 12, 32), (16, 65, 257))
    for context, trees, rows in cells:
        batch = batch_of([context] * trees, rows, 4, 8, 132)
        most = min(32, batch.tiles[0] // 2)
        fewest = min(makespan(batch, cut(batch, n)) for n in range(1, most + 1))
        chosen = slots_of(batch, batch.grid_split())
        ratios[context, trees, rows] = makespan(batch, chosen) / fewest
    assert ratios[4000, 8, 65] == 1.0
    assert sum(ratios.values()) < 1.04 * len(ratios)
    assert sum(ratio > 1.1 for ratio in ratios.values()) < 0.07 * len(ratios)


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from([None, None, 2, 7]))
def test_any_batch_finds_its_slots(batch, splits):
    """Every tile once; slots and partial results suffice; no place is idle for longer than the
    largest block takes, nor for half as long as the others work."""
    split = batch.grid_split(splits)
    parts = slots_of(batch, split)
    assert len(parts) <= split.slots
    seen: list[list[int]] = [[] for _ in batch.tiles]
    for part in parts:
        assert part.size > 0
        seen[part.tree] += range(part.begin, part.end)
    assert seen == [list(range(count)) for count in batch.tiles]
    cut = [part for part in parts if part.cut]
    # The kernel writes parts of cut trees by their slot.
    assert cut == parts[: len(cut)] and len(cut) <= split.parts
    if split.parts:
        size = part_size_of(batch, split)
        assert all(4 * (part.size - 1) <= 5 * size for part in parts)
    if splits is None:
        blocks = max(batch.row_blocks) * batch.heads
        assert split.parts * blocks <= 2 * WAVES[0] * batch.resident_ctas or len(batch.tiles) == 1
        if sum(batch.row_blocks) * batch.heads <= 4000:
            longest, mean = makespan(batch, parts), mean_load(batch, parts)
            assert longest <= mean + max((part.cost for part in parts), default=0)
            if even_share(batch) >= ENOUGH:
                assert longest <= 1.5 * mean


def test_few_tiles_are_left_whole():
    assert split_grid(32, 8, 16, 264, None) == GridSplit(0, 32, 0)
    assert split_grid(1, 8, 1, 264, None) == GridSplit(0, 1, 0)
    # an even batch that fills the device, but long enough that it may be uneven
    assert split_grid(33, 8, 512, 264, None).parts
    # parts of so many blocks would be more than four waves
    assert split_grid(2, 600, 512, 132, None) == GridSplit(0, 2, 0)
