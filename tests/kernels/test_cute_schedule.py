# SPDX-License-Identifier: Apache-2.0
"""How evenly the CuTe kernel's schedule cuts batches, simulated; not a measurement.

Times are tiles with the assumed costs of blocks and parts (`config.WHOLE_COST`, `config.CUT_COST`);
`resident_ctas` is the number of blocks that run at once.
"""

from __future__ import annotations

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


def cut(batch: Batch, parts: int) -> list[Part]:
    """Every tree in so many parts."""
    return [
        Part(tree, count * i // parts, count * (i + 1) // parts, parts > 1)
        for tree, count in enumerate(batch.tiles)
        for i in range(parts)
    ]


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


def test_a_skewed_batch_keeps_all_places_busy():
    batch = batch_of(SKEWED, 16, 4, 8, 132)
    assert unevenness(batch, slots_of(batch, batch.grid_split())) < 1.3


def test_the_simulation_notices_splits_of_the_grid():
    """The control: every tree in as many parts as any other."""
    batch = batch_of(SKEWED, 16, 4, 8, 132)
    for splits in (1, 4):
        assert unevenness(batch, cut(batch, splits)) > 3


def test_trees_that_fill_the_device_once_take_the_fewest_tiles_of_any_cut():
    """On an H100 eight of 65 rows over 4,096 tokens took a quarter longer in other parts."""
    batch = batch_of([4000] * 8, 65, 4, 8, 132)
    fewest = min(makespan(batch, cut(batch, n)) for n in range(1, 1 + batch.tiles[0] // 2))
    assert makespan(batch, slots_of(batch, batch.grid_split())) == fewest


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
