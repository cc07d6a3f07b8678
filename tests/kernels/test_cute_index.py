# SPDX-License-Identifier: Apache-2.0
"""Index arithmetic of the CuTe kernels, compiled for this CPU, against brute force in numpy."""

# No lazy annotations: cutlass reads those of traced functions.

import itertools

import numpy as np
import pytest
import torch

from tests.kernels import cute_schedule
from tests.kernels.paged import path_of, random_parents

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import from_dlpack

from vllm_specplug.kernels.cute import mask, pages, schedule
from vllm_specplug.kernels.cute.config import MASK_WORDS, TILE_N, WAVES, WORD_BITS

pytestmark = [
    pytest.mark.xdist_group("cute64"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NODES = (0, 1, 2, 62, 63, 64, 65, 127, 128, 256)
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


@cute.jit
def windows_of(
    parents: cute.Tensor,
    words: cute.Tensor,
    rows: Int32,
    full: Int32,
    context: Int32,
    dense: Int32,
    out: cute.Tensor,
):
    """out[row, tile]: windows of the tiles from the first that is not full."""
    tail = schedule.tail_begin(context, dense)
    first = schedule.full_tiles(context)
    for row in cutlass.range(rows):
        mask.write_words(parents, words, row, row, rows, full)
        for tile in cutlass.range(schedule.total_tiles(tail, rows) - first):
            column = (first + tile) * TILE_N
            out[row, tile] = mask.tile_window(words, row, column, context, tail)


@cute.jit
def pages_of(
    table: Int64,
    cached: Int32,
    shift: Int32,
    block_stride: Int64,
    slot_stride: Int64,
    out: cute.Tensor,
):
    for column in cutlass.range(cute.size(out)):
        page = pages.column_page(table, column, Int32(0), cached, shift)
        out[column] = pages.page_element(page, column, shift, block_stride, slot_stride)


class OffsetsOf:
    """Byte offsets of every chunk by our arithmetic, and elements by cutlass' plain layouts."""

    def __init__(self, rows: int, head_dim: int) -> None:
        self.rows, self.head_dim = rows, head_dim

    @cute.jit
    def __call__(self, ours: cute.Tensor, key: cute.Tensor, value: cute.Tensor):
        wide = cutlass.const_expr(pages.band_columns(self.head_dim) == 64)
        kinds = warpgroup.SmemLayoutAtomKind
        row_atom = warpgroup.make_smem_layout_atom(
            kinds.K_SW128 if wide else kinds.K_SW64, cutlass.BFloat16
        )
        column_atom = warpgroup.make_smem_layout_atom(
            kinds.MN_SW128 if wide else kinds.MN_SW64, cutlass.BFloat16
        )
        key_layout = cute.tile_to_shape(row_atom, (self.rows, self.head_dim, 1), (0, 1, 2))
        value_layout = cute.tile_to_shape(column_atom, (self.head_dim, self.rows, 1), (1, 0, 2))
        for row in cutlass.range(self.rows):
            for chunk in cutlass.range(self.head_dim // pages.CHUNK):
                column = chunk * pages.CHUNK
                ours[row, chunk] = pages.chunk_offset(row, chunk, self.rows, self.head_dim)
                key[row, chunk] = cute.crd2idx((row, column, 0), key_layout.outer)
                value[row, chunk] = cute.crd2idx((column, row, 0), value_layout.outer)


@cute.jit
def chunks_of(out: cute.Tensor, threads: Int32, steps: Int32, per_row: cutlass.Constexpr):
    for step in cutlass.range(steps):
        for thread in cutlass.range(threads):
            row, chunk = pages.chunks_of(thread, step, threads, per_row)
            out[step * threads + thread, 0] = row
            out[step * threads + thread, 1] = chunk


def compile_for(function, *tensors_and_values):
    return cute.compile(function, *tensors_and_values)


def test_tiles_and_parts():
    out = torch.zeros(300, dtype=torch.int32)
    blank = [Int32(1), Int32(1), Int32(0), Int32(2), Int32(0)]
    run = compile_for(schedule_of, *blank, from_dlpack(out))
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
    run = compile_for(part_sizes, *map(Int32, (1, 1, 1, 1, 1, 1)), from_dlpack(out))
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


@pytest.mark.parametrize("dense", [0, 1])
@pytest.mark.parametrize("full", [0, 1])
def test_windows_show_ancestors_and_context(dense, full):
    parents = torch.zeros(257, dtype=torch.int32)
    words = torch.zeros(257, MASK_WORDS, dtype=torch.uint64)
    out = torch.zeros(257, 6, dtype=torch.uint64)
    run = compile_for(
        windows_of,
        from_dlpack(parents),
        from_dlpack(words),
        Int32(1),
        Int32(full),
        Int32(0),
        Int32(dense),
        from_dlpack(out),
    )
    rng = np.random.default_rng(0)
    for nodes in NODES:
        rows = nodes + 1
        tree = random_parents(nodes, rng)
        if nodes == 256:
            tree = np.arange(-1, 255, dtype=np.int32)  # a chain over all words
        parents[:rows] = torch.from_numpy(np.concatenate([[-1], tree + 1]).astype(np.int32))
        for context in (0, 1, 37, 63, 64, 65, 130):
            words.fill_(2**63)  # what an earlier tree left behind
            out.zero_()
            run(
                from_dlpack(parents),
                from_dlpack(words),
                Int32(rows),
                Int32(full),
                Int32(context),
                Int32(dense),
                from_dlpack(out),
            )
            first = context // TILE_N * TILE_N
            tail = context + (-context % TILE_N if dense else 0)
            tiles = -(-(tail + rows) // TILE_N) - first // TILE_N
            expected = np.zeros((rows, tiles * TILE_N), bool)
            for row in range(rows):
                seen = range(rows) if full else path_of(tree, row)
                expected[row, : context - first] = True
                expected[row, [tail - first + j for j in seen]] = True
            bits = np.unpackbits(
                out[:rows, :tiles].contiguous().numpy().view(np.uint8), axis=1, bitorder="little"
            )
            np.testing.assert_array_equal(bits.astype(bool), expected)


def test_words_of_a_damaged_tree_end():
    """Rows that name themselves, a later row, or each other: the walk returns."""
    rows = 40
    parents = torch.full((257,), 7, dtype=torch.int32)
    parents[:rows] = torch.arange(1, rows + 1).int()
    words = torch.zeros(257, MASK_WORDS, dtype=torch.uint64)
    out = torch.zeros(257, 6, dtype=torch.uint64)
    tensors = [from_dlpack(t) for t in (parents, words)]
    run = compile_for(
        windows_of, *tensors, Int32(1), Int32(0), Int32(0), Int32(0), from_dlpack(out)
    )
    run(*tensors, Int32(rows), Int32(0), Int32(0), Int32(0), from_dlpack(out))
    # every row still attends itself, so that no row is empty
    for row in range(rows):
        assert int(words[row, row // WORD_BITS]) >> row % WORD_BITS & 1


@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_columns_find_their_page(page):
    generator = torch.Generator().manual_seed(page)
    table = torch.randperm(40, generator=generator).int()
    length = 3 * page + 5
    out = torch.zeros(4 * page, dtype=torch.int64)
    # strides of a cache whose heads lie between blocks and slots
    block_stride, slot_stride = 8 * page * 192, 192
    shift = page.bit_length() - 1
    table[4:] = 10**9  # entries past the columns used are not followed
    arguments = (
        Int64(table.data_ptr()),
        Int32(length),
        Int32(shift),
        Int64(block_stride),
        Int64(slot_stride),
        from_dlpack(out),
    )
    compile_for(pages_of, *arguments)(*arguments)
    for column in range(length):
        block = int(table[column // page])
        assert int(out[column]) == block * block_stride + column % page * slot_stride
    for column in range(length, 4 * page):
        assert int(out[column]) == column % page * slot_stride  # page 0, to be masked


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_chunks_land_where_wgmma_reads_them(head_dim):
    chunks = head_dim // pages.CHUNK
    ours, key, value = (torch.full((TILE_N, chunks), -1, dtype=torch.int32) for _ in range(3))
    tensors = [from_dlpack(t) for t in (ours, key, value)]
    compile_for(OffsetsOf(TILE_N, head_dim), *tensors)(*tensors)
    # cutlass swizzles the byte address: Swizzle<B, 4, 3> with B = 3 for 128-byte bands, 2 for 64
    flips = (1 << (3 if head_dim % 64 == 0 else 2)) - 1
    for elements in (key, value):
        linear = elements * 2
        torch.testing.assert_close(ours, linear ^ ((linear >> 7 & flips) << 4))
    assert sorted(ours.flatten().tolist()) == list(range(0, TILE_N * head_dim * 2, 16))


@pytest.mark.parametrize(("head_dim", "threads"), [(64, 128), (96, 384), (128, 128), (128, 384)])
def test_threads_share_out_every_chunk_once(head_dim, threads):
    per_row = head_dim // pages.CHUNK
    steps = pages.copies_per_thread(TILE_N, head_dim, threads)
    out = torch.zeros(steps * threads, 2, dtype=torch.int32)
    run = compile_for(chunks_of, from_dlpack(out), Int32(threads), Int32(steps), per_row)
    run(from_dlpack(out), Int32(threads), Int32(steps))
    inside = [tuple(pair) for pair in out.tolist() if pair[0] < TILE_N]
    assert sorted(inside) == [(row, chunk) for row in range(TILE_N) for chunk in range(per_row)]
