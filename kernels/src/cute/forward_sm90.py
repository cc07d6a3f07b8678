# SPDX-License-Identifier: Apache-2.0
"""Tree attention for Hopper: paged context, ancestor mask on the tail, trees shared out.

A block takes `tile_m` packed rows (tree row x query head of one KV head) of one tree and a share of
its tiles, see `shares`. Packed row p is tree row p // G, head p % G of the group. All threads load
and compute; K/V tiles stand in a ring of stages that is filled `stages - 1` ahead:

    wait for tile i -> barrier -> start loading tile i + stages - 1 -> S = Q K^T -> mask -> softmax
    -> O = O + P V

The barrier does two things: it shows tile i's copies to all threads, and it proves that every
warpgroup is done with tile i - 1, whose stage the next load overwrites.

Full tiles (all context) come by the copy engine, a box a page where pages are smaller than a tile,
or in variants without boxes by cp.async. The others always come by cp.async, which puts zeros where
no row is: a stale slot may hold NaN, and 0 * NaN in P V is NaN. Full tiles follow one another.
Before them comes at most one tile, into which a window begins: its stage's barrier is told of it,
so that a barrier's phase follows from the tile's number.

Sinks are a column without a key: they enter the sums of the first part once its tiles are done.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers

from ..cuda_contract import (
    MAX_TREE_ROWS,
    PLAN_CONTEXT,
    PLAN_MASK_START,
    PLAN_REQ,
    PLAN_ROW_COUNT,
    PLAN_ROW_START,
)
from . import mask, pages, schedule, shares, softmax
from .access import ELEMENT_BYTES, element_type, global_array, int32_at, number_at
from .bundle import Bundle
from .config import (
    MASK_WORDS,
    MAX_PAGE,
    TILE_N,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    ForwardConfig,
)
from .launch_params import FLOAT, FORWARD_PARAMETERS, INT

LOG2_E = math.log2(math.e)
# Extents of the tensor that the copy engine's descriptor stands for at compile time: only its
# box and the order of its dimensions matter, the launch encodes the real one.
_ANY_HEADS, _ANY_BLOCKS = 256, 1 << 20


def placeholders(parameters) -> Bundle:
    """Parameters of the right types, for tracing."""
    types = {INT: Int32, FLOAT: Float32}
    return Bundle(**{name: types.get(kind, Int64)(0) for name, kind in parameters})


class TreeAttnForwardSm90:
    """The attention kernel of one `ForwardConfig`."""

    def __init__(self, config: ForwardConfig) -> None:
        self.config = config
        self.dtype = element_type(config.dtype)

    @cute.jit
    def __call__(self, stream):
        """Compiled, never run: fixes layouts and the descriptors' box, then the kernel."""
        config = self.config
        head_dim = config.head_dim
        wide = cutlass.const_expr(pages.band_columns(head_dim) == 64)
        kinds = warpgroup.SmemLayoutAtomKind
        row_atom = warpgroup.make_smem_layout_atom(
            kinds.K_SW128 if wide else kinds.K_SW64, self.dtype
        )
        column_atom = warpgroup.make_smem_layout_atom(
            kinds.MN_SW128 if wide else kinds.MN_SW64, self.dtype
        )
        query_layout = cute.tile_to_shape(
            row_atom, (WARPGROUP_ROWS, head_dim, config.warpgroups), (0, 1, 2)
        )
        key_layout = cute.tile_to_shape(row_atom, (TILE_N, head_dim, config.stages), (0, 1, 2))
        # The same bytes as the boxes that are copied: slots, a band, boxes, bands.
        band = pages.band_columns(head_dim)
        box_layout = cute.tile_to_shape(
            row_atom,
            (TILE_N // config.boxes, band, config.boxes, head_dim // band, config.stages),
            (0, 1, 2, 3, 4),
        )
        # The same bytes as a key tile, seen from the other side.
        value_layout = cute.tile_to_shape(column_atom, (head_dim, TILE_N, config.stages), (1, 0, 2))
        major = cute.nvgpu.OperandMajorMode
        mma_scores = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            major.K,
            major.K,
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, TILE_N),
        )
        mma_output = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            major.K,
            major.MN,
            Float32,
            (1, 1, 1),
            (WARPGROUP_ROWS, head_dim),
            warpgroup.OperandSource.RMEM,
        )
        copies, tensors = (None, None), (None, None)
        if cutlass.const_expr(config.box > 0):
            nowhere = cute.make_ptr(self.dtype, Int64(0), cute.AddressSpace.gmem, assumed_align=128)
            slot = 2 * head_dim * _ANY_HEADS
            # [slot, element, head, block]
            cache = cute.make_tensor(
                nowhere,
                cute.make_layout(
                    (MAX_PAGE, head_dim, _ANY_HEADS, _ANY_BLOCKS),
                    stride=(slot, 1, 2 * head_dim, MAX_PAGE * slot),
                ),
            )
            box = cute.select(box_layout, mode=[0, 1])
            op = cpasync.CopyBulkTensorTileG2SOp()
            extent = (config.box, band)
            copy_key, keys = cpasync.make_tiled_tma_atom(op, cache, box, extent)
            copy_value, values = cpasync.make_tiled_tma_atom(op, cache, box, extent)
            copies, tensors = (copy_key, copy_value), (keys, values)
        self.kernel(
            copies[0], copies[1], tensors[0], tensors[1], mma_scores, mma_output, query_layout,
            key_layout, box_layout, value_layout, placeholders(FORWARD_PARAMETERS),
        ).launch(
            grid=(1, 1, 1), block=(config.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, copy_key: cute.CopyAtom | None, copy_value: cute.CopyAtom | None,
        keys: cute.Tensor | None, values: cute.Tensor | None, mma_scores: cute.TiledMma,
        mma_output: cute.TiledMma, query_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout, box_layout: cute.ComposedLayout,
        value_layout: cute.ComposedLayout, p,
    ):  # fmt: skip
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        row_block, kv_head, turn = cute.arch.block_idx()
        window = p.window if cutlass.const_expr(config.window) else Int32(0)
        tree, part, parts = shares.of_slot(
            p.plan, p.num_trees, window, p.dense, p.budget, p.slots, turn, thread % 32
        )

        smem = cutlass.memory.SmemAllocator()
        s_query = smem.allocate_tensor(
            self.dtype, query_layout.outer, byte_alignment=1024, swizzle=query_layout.inner
        )
        s_key = smem.allocate_tensor(
            self.dtype, key_layout.outer, byte_alignment=1024, swizzle=key_layout.inner
        )
        s_value = smem.allocate_tensor(
            self.dtype, value_layout.outer, byte_alignment=1024, swizzle=value_layout.inner
        )
        words_layout = cute.make_layout((config.tile_m, MASK_WORDS), stride=(MASK_WORDS, 1))
        s_words = smem.allocate_tensor(Uint64, words_layout, byte_alignment=128)
        s_parents = smem.allocate_tensor(Int32, cute.make_layout(MAX_TREE_ROWS), byte_alignment=128)
        barriers = smem.allocate_array(Int64, config.stages)

        # Uniform over the block, so that all its threads or none meet at the barriers.
        rows = Int32(0)
        if tree >= 0:
            rows = cutlass.min(
                int32_at(p.plan, PLAN_ROW_COUNT * p.num_trees + tree), Int32(MAX_TREE_ROWS)
            )
        first_packed = row_block * config.tile_m
        packed_rows = rows * p.group
        if first_packed < packed_rows:
            context = int32_at(p.plan, PLAN_CONTEXT * p.num_trees + tree)
            tail = schedule.tail_begin(context, p.dense)
            # Columns before `seen` are out of every row's sight, and their pages another request's.
            seen = schedule.first_seen(context, window)
            first = schedule.first_tile(context, window)
            tiles = schedule.total_tiles(tail, rows) - first
            begin = schedule.part_begin(first, tiles, parts, part)
            end = schedule.part_begin(first, tiles, parts, part + 1)
            request = int32_at(p.plan, PLAN_REQ * p.num_trees + tree)
            mask_start = int32_at(p.plan, PLAN_MASK_START * p.num_trees + tree)
            row_start = int32_at(p.plan, PLAN_ROW_START * p.num_trees + tree)
            head = Int64(kv_head)
            tail_row = Int64(mask_start)
            b = Bundle(
                thread=thread,
                warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()),
                kv_head=kv_head,
                rows=rows,
                context=context,
                tail=tail,
                seen=seen,
                full_begin=(seen + TILE_N - 1) // TILE_N,
                full_end=schedule.full_tiles(context),
                # every row attends the context from this column on: none is deeper than there
                # are rows before it
                seen_by_all=context + rows - window,
                # columns that lie in the cache
                cached=context + (1 - p.dense) * rows,
                mask_start=mask_start,
                row_start=row_start,
                first_packed=first_packed,
                packed_rows=packed_rows,
                page_table=p.table + Int64(request) * Int64(p.table_width) * 4,
                key=p.key + head * p.key_head * ELEMENT_BYTES,
                value=p.value + head * p.value_head * ELEMENT_BYTES,
                tail_key=p.tail_key
                + (tail_row * p.tail_key_row + head * p.tail_key_head) * ELEMENT_BYTES,
                tail_value=p.tail_value
                + (tail_row * p.tail_value_row + head * p.tail_value_head) * ELEMENT_BYTES,
                shared_key=Int32(s_key.iterator.toint()),
                shared_value=Int32(s_value.iterator.toint()),
            )
            if cutlass.const_expr(config.box > 0):
                if thread == 0:
                    for stage in cutlass.range_constexpr(config.stages):
                        cute.arch.mbarrier_init(barriers + stage, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.sync_threads()

            # Pages of the tile that is loaded next, read one tile ahead of its copies.
            page_ids = cute.make_rmem_tensor(cute.make_layout(self.page_copies), Int32)
            # A value tile has a key tile's bytes.
            key_boxes = cute.make_tensor(s_key.iterator, box_layout.outer)
            value_boxes = cute.make_tensor(s_value.iterator, box_layout.outer)
            self.load_query(p, b, Int32(s_query.iterator.toint()))
            self.load_pages(p, b, begin, end, page_ids)
            for ahead in cutlass.range(config.stages - 1, unroll=1):
                self.load_tile(
                    p, b, begin, begin + ahead, end, page_ids,
                    copy_key, copy_value, keys, values, key_boxes, value_boxes, barriers,
                )  # fmt: skip
                self.load_pages(p, b, begin + ahead + 1, end, page_ids)
            if cutlass.const_expr(config.placed):
                self.build_masks(p, b, s_parents, s_words)
            else:
                if end > b.full_end:
                    self.build_masks(p, b, s_parents, s_words)

            group = b.warp // 4
            in_group = thread % WARPGROUP_THREADS
            group_packed = first_packed + group * WARPGROUP_ROWS
            thread_scores = mma_scores.get_slice(0)
            thread_output = mma_output.get_slice(0)
            frag_query = mma_scores.make_fragment_A(thread_scores.partition_A(s_query))
            frag_key = mma_scores.make_fragment_B(thread_scores.partition_B(s_key))
            frag_value = mma_output.make_fragment_B(thread_output.partition_B(s_value))
            scores = thread_scores.make_fragment_C(
                thread_scores.partition_shape_C((WARPGROUP_ROWS, TILE_N))
            )
            weights = cute.make_rmem_tensor(
                thread_output.partition_shape_A((WARPGROUP_ROWS, TILE_N)), self.dtype
            )
            output = thread_output.make_fragment_C(
                thread_output.partition_shape_C((WARPGROUP_ROWS, config.head_dim))
            )
            row_max = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Float32)
            row_sum = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Float32)
            # Positions of a thread's rows and, in base two, slopes of their heads.
            positions = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Int32)
            slopes = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Float32)
            if cutlass.const_expr(config.placed):
                for r in cutlass.range_constexpr(softmax.ROWS):
                    last = cutlass.min(group_packed + softmax.row_of(in_group, r), packed_rows - 1)
                    own = self.mask_slot(p, first_packed, last, packed_rows)
                    positions[r] = context + mask.rows_from(s_words, own, Int32(0)) - 1
                    if cutlass.const_expr(config.alibi):
                        of_head = kv_head * p.group + last % p.group
                        slopes[r] = number_at(p.slopes, of_head, p.slope_kind) * LOG2_E
            output.fill(0.0)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)

            for tile in cutlass.range(begin, end, unroll=1):
                stage = (tile - begin) % config.stages
                cute.arch.cp_async_wait_group(config.stages - 2)
                cute.arch.fence_proxy("async.shared", space="cta")
                if cutlass.const_expr(config.box > 0):
                    if tile < b.full_end and tile >= b.full_begin:
                        cute.arch.mbarrier_wait(
                            barriers + stage, (tile - begin) // config.stages & 1
                        )
                cute.arch.sync_threads()
                self.load_tile(
                    p, b, begin, tile + config.stages - 1, end, page_ids,
                    copy_key, copy_value, keys, values, key_boxes, value_boxes, barriers,
                )  # fmt: skip
                self.load_pages(p, b, tile + config.stages, end, page_ids)
                # A warpgroup of padding alone only keeps the barriers.
                if group_packed < packed_rows:
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(cute.size(frag_query, mode=[2])):
                        mma_scores.set(warpgroup.Field.ACCUMULATE, k != 0)
                        cute.gemm(
                            mma_scores,
                            scores,
                            frag_query[None, None, k, group],
                            frag_key[None, None, k, stage],
                            scores,
                        )
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    flat_scores = cute.make_tensor(
                        scores.iterator, cute.make_layout(cute.size(scores))
                    )
                    flat_output = cute.make_tensor(
                        output.iterator, cute.make_layout(cute.size(output))
                    )
                    scale_log2 = p.scale_log2
                    if cutlass.const_expr(config.soft_cap or config.alibi):
                        softmax.scale_scores(flat_scores, p.scale_log2)
                        scale_log2 = Float32(1.0)
                    if cutlass.const_expr(config.soft_cap):
                        softmax.cap_scores(flat_scores, p.cap_in, p.cap_out)
                    column = tile * TILE_N
                    if tile >= b.full_end:
                        for r in cutlass.range_constexpr(softmax.ROWS):
                            packed = group_packed + softmax.row_of(in_group, r)
                            slot = self.mask_slot(p, first_packed, packed, packed_rows)
                            bits = mask.tile_window(s_words, slot, column, context, tail)
                            if cutlass.const_expr(config.placed):
                                after = mask.rows_from(s_words, slot, column + TILE_N - tail)
                                if cutlass.const_expr(config.alibi):
                                    softmax.slant_tail(
                                        flat_scores, r, slopes[r], bits, after, in_group % 32
                                    )
                                if cutlass.const_expr(config.window):
                                    bits = mask.keep_last(bits, after, p.window)
                            softmax.mask_row(flat_scores, r, bits, in_group % 32)
                    else:
                        if cutlass.const_expr(config.alibi):
                            for r in cutlass.range_constexpr(softmax.ROWS):
                                softmax.slant_context(
                                    flat_scores, r, slopes[r], positions[r] - column, in_group % 32
                                )
                        if cutlass.const_expr(config.window):
                            if column < b.seen_by_all:
                                for r in cutlass.range_constexpr(softmax.ROWS):
                                    bits = mask.context_window(positions[r], p.window, column)
                                    softmax.mask_row(flat_scores, r, bits, in_group % 32)
                    softmax.online_step(flat_scores, flat_output, row_max, row_sum, scale_log2)
                    flat_weights = cute.make_tensor(
                        weights.iterator, cute.make_layout(cute.size(weights))
                    )
                    flat_weights.store(flat_scores.load().to(self.dtype))
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(cute.size(weights, mode=[2])):
                        mma_output.set(warpgroup.Field.ACCUMULATE, True)
                        cute.gemm(
                            mma_output,
                            output,
                            weights[None, None, k],
                            frag_value[None, None, k, stage],
                            output,
                        )
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
            to_log2 = p.scale_log2
            if cutlass.const_expr(config.soft_cap or config.alibi):
                to_log2 = Float32(1.0)
            self.store(
                p, b, to_log2, turn, part, parts, group_packed, in_group, output, row_max, row_sum
            )

    @property
    def column_copies(self) -> int:
        """Copies of a thread for one K or V tile."""
        return pages.copies_per_thread(TILE_N, self.config.head_dim, self.config.threads)

    @property
    def page_copies(self) -> int:
        """Pages that a thread holds for a tile."""
        return max(self.column_copies, self.config.boxes)

    @cute.jit
    def mask_slot(self, p, first_packed: Int32, packed: Int32, packed_rows: Int32) -> Int32:
        """Row of the mask words that a packed row uses; padding uses the last real row's."""
        clipped = cutlass.min(packed, packed_rows - 1)
        return clipped // p.group - first_packed // p.group

    @cute.jit
    def load_query(self, p, b, shared: Int32):
        """The block's packed rows of the query; zeros past the tree's last row."""
        config = self.config
        per_row = cutlass.const_expr(config.head_dim // pages.CHUNK)
        tile_bytes = cutlass.const_expr(WARPGROUP_ROWS * config.head_dim * ELEMENT_BYTES)
        for step in cutlass.range_constexpr(
            pages.copies_per_thread(config.tile_m, config.head_dim, config.threads)
        ):
            row, chunk = pages.chunks_of(b.thread, step, config.threads, per_row)
            packed = b.first_packed + row
            tree_row = packed // p.group
            head = b.kv_head * p.group + packed % p.group
            element = Int64(b.row_start + tree_row) * p.query_row + Int64(head) * p.query_head
            address = p.query + (element + chunk * pages.CHUNK) * ELEMENT_BYTES
            offset = row // WARPGROUP_ROWS * tile_bytes + pages.chunk_offset(
                row % WARPGROUP_ROWS, chunk, WARPGROUP_ROWS, config.head_dim
            )
            valid = packed < b.packed_rows
            pages.copy_chunk(shared + offset, address if valid else p.query, valid)

    @cute.jit
    def load_pages(self, p, b, tile: Int32, end: Int32, page_ids: cute.Tensor):
        """Pages of a tile for the copies to come; nothing is read past the block's end."""
        cached = b.cached if tile < end else Int32(0)
        if cutlass.const_expr(self.config.box > 0):
            if tile < b.full_end and tile >= b.full_begin:
                # The copy engine takes a box from one page.
                for i in cutlass.range_constexpr(self.config.boxes):
                    column = tile * TILE_N + i * self.config.box
                    page_ids[i] = pages.column_page(
                        b.page_table, column, b.seen, cached, p.page_shift
                    )
            else:
                self.load_column_pages(p, b, tile, cached, page_ids)
        else:
            self.load_column_pages(p, b, tile, cached, page_ids)

    @cute.jit
    def load_column_pages(self, p, b, tile: Int32, cached: Int32, page_ids: cute.Tensor):
        """Pages of the columns that this thread copies."""
        config = self.config
        per_row = cutlass.const_expr(config.head_dim // pages.CHUNK)
        for step in cutlass.range_constexpr(self.column_copies):
            row, _ = pages.chunks_of(b.thread, step, config.threads, per_row)
            column = tile * TILE_N + row
            own = cached if row < TILE_N else Int32(0)
            page_ids[step] = pages.column_page(b.page_table, column, b.seen, own, p.page_shift)

    @cute.jit
    def load_tile(
        self, p, b, begin: Int32, tile: Int32, end: Int32, page_ids: cute.Tensor, copy_key,
        copy_value, keys, values, s_key: cute.Tensor, s_value: cute.Tensor, barriers,
    ):  # fmt: skip
        """Starts the copies of a tile to its stage, none past the end, and closes their group."""
        config = self.config
        if tile < end:
            stage = (tile - begin) % config.stages
            if cutlass.const_expr(config.box > 0):
                if tile < b.full_end and tile >= b.full_begin:
                    if b.warp == 0:
                        self.copy_full_tile(
                            p, b, tile, stage, page_ids,
                            copy_key, copy_value, keys, values, s_key, s_value, barriers,
                        )  # fmt: skip
                else:
                    if cutlass.const_expr(config.window):
                        if tile < b.full_end and b.thread == 0:
                            cute.arch.mbarrier_arrive(barriers + stage)
                    self.copy_columns(p, b, tile, stage, page_ids)
            else:
                self.copy_columns(p, b, tile, stage, page_ids)
        # A group a tile, empty ones too, so that the count of groups tells the tile.
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_full_tile(
        self, p, b, tile: Int32, stage: Int32, page_ids: cute.Tensor, copy_key, copy_value,
        keys, values,
        # [box slots, band, boxes, bands, stages]
        s_key: cute.Tensor, s_value: cute.Tensor, barriers,
    ):  # fmt: skip
        """One warp: K and V of a tile, a box of a page and a band at a time, by the copy engine."""
        config = self.config
        band = cutlass.const_expr(pages.band_columns(config.head_dim))
        barrier = barriers + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * config.tile_bytes)
        for i in cutlass.range_constexpr(config.boxes):
            inside = tile * TILE_N + i * config.box & ((Int32(1) << p.page_shift) - 1)
            for atom, tensor, boxes in ((copy_key, keys, s_key), (copy_value, values, s_value)):
                tiles = cute.local_tile(
                    tensor[None, None, b.kv_head, page_ids[i]], (config.box, band), (None, None)
                )
                to_shared, from_global = cpasync.tma_partition(
                    atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(boxes, 0, 2),
                    cute.group_modes(tiles, 0, 2),
                )
                for j in cutlass.range_constexpr(config.head_dim // band):
                    cute.copy(
                        atom,
                        from_global[None, inside // config.box, j],
                        to_shared[None, i, j, stage],
                        tma_bar_ptr=barrier,
                    )

    @cute.jit
    def copy_columns(self, p, b, tile: Int32, stage: Int32, page_ids: cute.Tensor):
        """All threads: K and V of a tile by 16-byte copies; zeros in columns of no row."""
        config = self.config
        per_row = cutlass.const_expr(config.head_dim // pages.CHUNK)
        shared_key = b.shared_key + stage * config.tile_bytes
        shared_value = b.shared_value + stage * config.tile_bytes
        for step in cutlass.range_constexpr(self.column_copies):
            row, chunk = pages.chunks_of(b.thread, step, config.threads, per_row)
            if row < TILE_N:
                column = tile * TILE_N + row
                valid = column >= b.seen and column < b.cached
                key = b.key + ELEMENT_BYTES * pages.page_element(
                    page_ids[step], column, p.page_shift, p.key_block, p.key_slot
                )
                value = b.value + ELEMENT_BYTES * pages.page_element(
                    page_ids[step], column, p.page_shift, p.value_block, p.value_slot
                )
                tail_row = column - b.tail
                if p.dense == 1 and tail_row >= 0:
                    valid = tail_row < b.rows
                    inside = tail_row if valid else Int32(0)
                    key = b.tail_key + ELEMENT_BYTES * (Int64(inside) * p.tail_key_row)
                    value = b.tail_value + ELEMENT_BYTES * (Int64(inside) * p.tail_value_row)
                offset = pages.chunk_offset(row, chunk, TILE_N, config.head_dim)
                skip = chunk * pages.CHUNK_BYTES
                pages.copy_chunk(shared_key + offset, key + skip, valid)
                pages.copy_chunk(shared_value + offset, value + skip, valid)

    @cute.jit
    def build_masks(self, p, b, s_parents: cute.Tensor, s_words: cute.Tensor):
        """Mask words of the block's tree rows, while its first tiles are on the way."""
        config = self.config
        if p.full == 0:
            for i in cutlass.range(b.thread, b.rows, config.threads, unroll=1):
                s_parents[i] = int32_at(p.parents, b.mask_start + i)
        cute.arch.sync_threads()
        first_row = b.first_packed // p.group
        last_row = (cutlass.min(b.first_packed + config.tile_m, b.packed_rows) - 1) // p.group
        for slot in cutlass.range(b.thread, last_row - first_row + 1, config.threads, unroll=1):
            mask.write_words(s_parents, s_words, slot, first_row + slot, b.rows, p.full)
        cute.arch.sync_threads()

    @cute.jit
    def store(
        self, p, b, scale_log2: Float32, turn: Int32, part: Int32, parts: Int32,
        group_packed: Int32, in_group: Int32, output: cute.Tensor, row_max: cute.Tensor,
        row_sum: cute.Tensor,
    ):  # fmt: skip
        """The finished rows, or this block's part of them where the tree has several."""
        flat = cute.make_tensor(output.iterator, cute.make_layout(cute.size(output)))
        num_heads = p.num_kv_heads * p.group
        for r in cutlass.range_constexpr(softmax.ROWS):
            sum_ = softmax.quad_sum(row_sum[r])
            packed = group_packed + softmax.row_of(in_group, r)
            if packed < b.packed_rows:
                tree_row = packed // p.group
                head = b.kv_head * p.group + packed % p.group
                # A row may attend no column of its part: it has sum 0 and adds nothing. A sum of
                # NaN is a row's that attends NaN.
                decay = Float32(1.0)
                top = row_max[r] * scale_log2
                if p.sinks != 0 and part == 0:
                    sink = number_at(p.sinks, head, p.sink_kind) * LOG2_E
                    highest = cute.arch.fmax(top, sink)
                    reference = Float32(0.0) if highest == -Float32.inf else highest
                    decay = cute.math.exp2(top - reference, fastmath=True)
                    sum_ = sum_ * decay + cute.math.exp2(sink - reference, fastmath=True)
                    top = reference
                inverse = decay / sum_ if sum_ != 0.0 else Float32(0.0)
                column = in_group % 4 * 2
                if parts > 1:
                    place = (Int64(turn) * p.part_rows + tree_row) * num_heads + head
                    if in_group % 4 == 0:
                        lse = -Float32.inf
                        if sum_ != 0.0:
                            lse = top + cute.math.log2(sum_, fastmath=True)
                        global_array(Float32, p.part_lse + place * 4, 1)[0] = lse
                    first = p.part_out + (place * self.config.head_dim + column) * 4
                    self.store_row(flat, r, inverse, first, Float32)
                else:
                    element = (
                        Int64(b.row_start + tree_row) * p.output_row
                        + Int64(head) * p.output_head
                        + column
                    )
                    first = p.output + element * ELEMENT_BYTES
                    self.store_row(flat, r, inverse, first, self.dtype)

    @cute.jit
    def store_row(
        self, flat: cute.Tensor, r: cutlass.Constexpr, inverse: Float32, first: Int64,
        element: cutlass.Constexpr,
    ):  # fmt: skip
        """A thread's pairs of accumulator row r, 8 columns apart, scaled by `inverse`."""
        for j in cutlass.range_constexpr(cute.size(flat) // 4):
            pair = cute.make_rmem_tensor(cute.make_layout(2), element)
            for c in cutlass.range_constexpr(2):
                pair[c] = (flat[c + 2 * r + 4 * j] * inverse).to(element)
            cute.autovec_copy(pair, global_array(element, first + 8 * j * element.width // 8, 2))
