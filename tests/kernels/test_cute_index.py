# SPDX-License-Identifier: Apache-2.0
"""The schedule arithmetic of the CuTe kernels, compiled for this CPU, against brute force; contexts
and batches are larger than the emulator of `tests/ptx` can step."""

# No lazy annotations: cutlass reads those of traced functions.

import itertools

import numpy as np
import pytest
import torch

from tests.kernels import cute_schedule

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack

from vllm_specplug.kernels.cute import schedule
from vllm_specplug.kernels.cute.config import TILE_N, WAVES

pytestmark = [
    pytest.mark.xdist_group("cute64"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CONTEXTS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 32767, 32768)


@cute.jit
def schedule_of(
    context: Int32, rows: Int32, dense: Int32, size: Int32, window: Int32, out: cute.Tensor
):
    first = schedule.first_tile(context, window)
    tail = schedule.tail_begin(context, dense)
    total = schedule.total_tiles(tail, rows)
    out[0] = schedule.full_tiles(context)
    out[1] = tail
    out[2] = total
    parts = schedule.parts_of(total - first, size)
    out[3] = parts
    for part in cutlass.range(parts + 1):
        out[4 + part] = schedule.part_begin(first, total - first, parts, part)


@cute.jit
def part_sizes(
    work: Int32, parts: Int32, part: Int32, whole: Int32, heads: Int32, resident_ctas: Int32,
    out: cute.Tensor,
):  # fmt: skip
    out[0] = schedule.tiles_per_part(work, parts)
    for i in cutlass.range_constexpr(len(WAVES)):
        out[1 + i] = schedule.wave_part_tiles(work, WAVES[i], resident_ctas, heads)
    out[1 + len(WAVES)] = schedule.estimate_makespan(
        parts, part, work, 9 * part, whole, heads, resident_ctas
    )
    out[2 + len(WAVES)] = schedule.row_blocks(part, whole, 128)


def test_tiles_and_parts():
    out = torch.zeros(300, dtype=torch.int32)
    blank = [Int32(1), Int32(1), Int32(0), Int32(2), Int32(0)]
    run = cute.compile(schedule_of, *blank, from_dlpack(out))
    for context, window in itertools.product(CONTEXTS, (0, 1, 64, 100)):
        for rows in (1, 2, 64, 65, 257):
            for dense in (0, 1):
                for size in (2, 3, 7, 33, 600):
                    numbers = (context, rows, dense, size, window)
                    run(*map(Int32, numbers), from_dlpack(out))
                    full, tail, total, parts, *begins = out.tolist()
                    begins = begins[: parts + 1]
                    # columns by definition: context, then empty ones up to the tail, then rows
                    empty = -context % TILE_N if dense else 0
                    columns = context + empty + rows
                    assert tail == context + empty and full == context // TILE_N
                    assert total == len(range(0, columns, TILE_N))
                    lowest = max(0, context - window + 1) if window else 0
                    assert begins[0] == lowest // TILE_N and begins[-1] == total
                    sizes = np.diff(begins)
                    assert sizes.min() > 0 and sizes.max() - sizes.min() <= 1
                    # as large as may be, and none over five quarters of a size
                    tiles = total - begins[0]
                    assert 4 * tiles <= 5 * size * parts + size * (parts > 1)
                    assert parts == 1 or 4 * tiles > (4 * (parts - 1) + 1) * size


def test_shares_are_those_of_the_simulation():
    out = torch.zeros(3 + len(WAVES), dtype=torch.int32)
    run = cute.compile(part_sizes, *map(Int32, (1, 1, 1, 1, 1, 1)), from_dlpack(out))
    for work, parts, part, whole, heads, resident_ctas in itertools.product(
        (1, 500, 2**21), (0, 1, 70), (0, 16), (0, 19), (1, 3, 32), (108, 264)
    ):
        run(*map(Int32, (work, parts, part, whole, heads, resident_ctas)), from_dlpack(out))
        batch = cute_schedule.Batch([work], [1], heads, resident_ctas)
        expected = [cute_schedule.tiles_per_part(work, parts)]
        expected += [cute_schedule.wave_part_tiles(batch, waves) for waves in WAVES]
        estimated = cute_schedule.makespan_of(
            parts, part, work, 9 * part, whole, heads, resident_ctas
        )
        expected += [estimated]
        assert out.tolist() == [*expected, -(-part * whole // 128)]
