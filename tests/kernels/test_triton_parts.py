# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel's schedule in its interpreter: that of the simulation, and skewed batches."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.kernels.cute_schedule import Batch, slots_of, up
from tests.kernels.device_trees import DeviceTrees
from vllm_specplug.kernels import AttnFeatures, tree_attn_triton
from vllm_specplug.kernels.cute.config import TILE_N
from vllm_specplug.kernels.tree_parts_triton import MIN_TILES, part_of_slot

pytestmark = pytest.mark.usefixtures("interpreter")

GROUP, BLOCK_M = 4, 64


@triton.jit
def _some_slots(
    plan, num_trees, forced_parts, resident_ctas, extra, num_heads, slots, out,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    slot = tl.load(slots + program)
    tree, part, parts = part_of_slot(
        plan, num_trees, num_trees, forced_parts, resident_ctas, extra, num_heads, slot, WINDOW,
        GROUP, BLOCK_M,
    )  # fmt: skip
    tl.store(out + 3 * program, tree)
    tl.store(out + 3 * program + 1, part)
    tl.store(out + 3 * program + 2, parts)


def tiles_of(context: int, rows: int, window: int) -> int:
    """Those of the context from the window's, then those of the tree's own columns."""
    seen = max(0, context - window + 1) // TILE_N * TILE_N if window else 0
    return up(context - min(seen, context), TILE_N) + up(rows, TILE_N) if rows else 0


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("window", [0, 700])
def test_slots_are_those_of_the_simulation(splits: int | None, window: int) -> None:
    draw = random.Random(0)
    for trees, heads, longest in (
        (2, 8, 100_000),
        (7, 1, 4000),
        (32, 8, 100_000),
        (129, 1, 30_000),
    ):
        contexts = [draw.choice([0, 900, draw.randint(0, longest)]) for _ in range(trees)]
        rows = [draw.choice([0, 1, 16, 65, 257]) for _ in range(trees)]
        rows[-1] = 257
        resident_ctas = draw.choice([216, 264])
        tiles = [tiles_of(c, r, window) for c, r in zip(contexts, rows, strict=True)]
        blocks = [up(r * GROUP, BLOCK_M) for r in rows]
        batch = Batch(tiles, blocks, heads, resident_ctas, MIN_TILES)
        split = batch.grid_split(splits)
        assert split.parts
        plan = torch.zeros(5, trees, dtype=torch.int32)
        plan[2], plan[3] = torch.tensor(rows), torch.tensor(contexts)
        plan[3][plan[2] == 0] = -(10**6)  # of a skipped tree, nothing else is read
        parts = slots_of(batch, split)
        cut = sum(part.cut for part in parts)
        edges = {0, cut - 1, cut, len(parts) - 1, len(parts), split.slots - 1}
        asked = sorted({*edges, *draw.choices(range(len(parts)), k=6)} & {*range(split.slots)})
        out = torch.zeros(len(asked), 3, dtype=torch.int32)
        _some_slots[(len(asked),)](
            plan, trees, split.forced_parts, resident_ctas, split.slots - trees, heads,
            torch.tensor(asked), out, window, GROUP, BLOCK_M,
        )  # fmt: skip
        for slot, (tree, index, count) in zip(asked, out.tolist(), strict=True):
            if slot >= len(parts):
                assert tree == -1
                continue
            part, total = parts[slot], tiles[tree]
            assert (tree, count > 1) == (part.tree, part.cut)
            assert total * index // count == part.begin
            assert total * (index + 1) // count == part.end


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 16 SMs: one KV head has as many resident blocks as eight have on an H100."""
    limits = (16, 227 * 1024, 9)
    monkeypatch.setitem(tree_attn_triton._LIMITS, torch.device("cpu"), limits)


@pytest.mark.parametrize(
    ("longest", "others"), [(2_000, 7), pytest.param(100_000, 31, marks=pytest.mark.full)]
)
@pytest.mark.usefixtures("small_device")
def test_short_contexts_beside_a_long_one(longest: int, others: int) -> None:
    """Unowned slots are NaN."""
    specs = [(longest, 8), *[(longest // 100 + n, 8) for n in range(others)]]
    DeviceTrees(specs, group=10, page=64).check()


@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize(
    ("mask", "features"),
    [
        ("tree", AttnFeatures()),
        pytest.param("causal", AttnFeatures(), marks=pytest.mark.full),
        pytest.param(
            "tree", AttnFeatures(window=600, soft_cap=1.5, sinks=torch.randn(4)),
            marks=pytest.mark.full,
        ),
    ],
    ids=["tree", "causal", "features"],
)  # fmt: skip
def test_trees_of_unlike_row_blocks_beside_a_long_context(
    mask: str, features: AttnFeatures
) -> None:
    specs = [(700, 40), (200, 7), (80, 0), (0, 20), (31, 33)]
    DeviceTrees(specs, group=4, mask=mask, features=features).check(skipped=2)


@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize("dense", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_tail_may_be_cut_too(dense: bool) -> None:
    DeviceTrees([(500, 200), (64, 70)], group=2, dense=dense).check(splits=3)


@pytest.mark.usefixtures("small_device")
def test_the_check_notices_a_part_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = tree_attn_triton.merge_parts

    def short(part_out, part_lse, part_record, *rest, **options):
        part_record[:, 1] -= (part_record[:, 1] > 2).int()
        merge(part_out, part_lse, part_record, *rest, **options)

    monkeypatch.setattr(tree_attn_triton, "merge_parts", short)
    with pytest.raises(AssertionError, match="off by"):
        DeviceTrees([(1300, 8), (100, 3)]).check()
