# SPDX-License-Identifier: Apache-2.0
"""Tree attention for Hopper: paged context, ancestor mask on the tail, split along the context.

A block processes `tile_m` packed rows (tree row x query head of one KV head) of one tree and one
part of its tiles, see `tile_scheduler`. Packed row p is tree row p // G, head p % G of the group.
K/V tiles are in a ring of stages. A block of one warpgroup runs `mainloop_basic`, in which all
threads load and compute; a larger one runs the warp-specialised `mainloop_specialised`.

TMA loads full tiles (all context), with one box per page if pages are smaller than a tile. All
other tiles use cp.async, which writes zeros to columns without a
row: a stale slot may hold NaN, and 0 * NaN in P V is NaN. Full tiles are contiguous. At most one
tile precedes them, the one in which a window begins. It arrives at its stage's barrier too, so that
the phase of a barrier follows from the tile number.

A sink is a column without a key. It enters the sums of the first part after all of its tiles.
"""

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
from . import schedule, tile_scheduler
from .access import ELEMENT_BYTES, element_type, global_array, int32_at
from .bundle import Bundle
from .config import (
    MASK_WORDS,
    MAX_PAGE,
    TILE_N,
    WARPGROUP_ROWS,
    ForwardConfig,
    band_columns,
)
from .launch_params import FLOAT, FORWARD_PARAMETERS, INT
from .mainloop_basic import MainloopBasic
from .mainloop_specialised import MainloopSpecialised

# Per warpgroup.
WARPS = 4
# Extents of the cache for the TMA descriptor at compile time. Only the box and the order of the
# dimensions matter; the launch encodes the real descriptor.
_ANY_HEADS, _ANY_BLOCKS = 256, 1 << 20


def placeholders(parameters) -> Bundle:
    """Returns zeros of the parameters' types, for tracing."""
    types = {INT: Int32, FLOAT: Float32}
    return Bundle(**{name: types.get(kind, Int64)(0) for name, kind in parameters})


class TreeAttnForwardSm90(MainloopBasic, MainloopSpecialised):
    """The attention kernel of one `ForwardConfig`."""

    def __init__(self, config: ForwardConfig) -> None:
        self.config = config
        self.dtype = element_type(config.dtype)

    @cute.jit
    def __call__(self, stream):
        """The traced host function: layouts, TMA atoms, the launch. It is never run."""
        config = self.config
        head_dim = config.head_dim
        wide = cutlass.const_expr(band_columns(head_dim) == 64)
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
        # The same bytes by TMA box: slots, columns of a band, boxes, bands, stages.
        band = band_columns(head_dim)
        box_layout = cute.tile_to_shape(
            row_atom,
            (TILE_N // config.boxes, band, config.boxes, head_dim // band, config.stages),
            (0, 1, 2, 3, 4),
        )
        # The bytes of a key tile as an MN-major operand.
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
        self.kernel(
            copy_key, copy_value, keys, values, mma_scores, mma_output, query_layout,
            key_layout, box_layout, value_layout, placeholders(FORWARD_PARAMETERS),
        ).launch(
            grid=(1, 1, 1), block=(config.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, copy_key: cute.CopyAtom, copy_value: cute.CopyAtom,
        keys: cute.Tensor, values: cute.Tensor, mma_scores: cute.TiledMma,
        mma_output: cute.TiledMma, query_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout, box_layout: cute.ComposedLayout,
        value_layout: cute.ComposedLayout, p,
    ):  # fmt: skip
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        row_block, kv_head, slot = cute.arch.block_idx()
        window = p.window if cutlass.const_expr(config.window) else Int32(0)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

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
        barriers = smem.allocate_array(Int64, config.barriers)
        s_work = smem.allocate_tensor(Int32, cute.make_layout(3), byte_alignment=4)

        tree = slot
        part = Int32(0)
        parts = Int32(1)
        if p.slots > p.num_trees:
            if warp == 0:
                found = tile_scheduler.work_of_slot(p, window, slot, thread, config.tile_m)
                if thread == 0:
                    s_work[0] = found[0]
                    s_work[1] = found[1]
                    s_work[2] = found[2]
                    if found[0] >= 0 and found[1] == 0 and row_block == 0 and kv_head == 0:
                        record = global_array(Int32, p.part_record + Int64(found[0]) * 8, 2)
                        record[0] = slot
                        record[1] = found[2]
            cute.arch.sync_threads()
            tree = s_work[0]
            part = s_work[1]
            parts = s_work[2]

        # Uniform over the block: either all threads reach the barriers, or none.
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
            # No row attends columns before this. Their pages may belong to another request.
            first_column = schedule.first_visible(context, window)
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
                warp=warp,
                kv_head=kv_head,
                rows=rows,
                context=context,
                tail=tail,
                first_visible=first_column,
                full_begin=(first_column + TILE_N - 1) // TILE_N,
                full_end=schedule.full_tiles(context),
                # every row attends the context from this column on, because the depth of a row
                # is less than the number of rows
                visible_to_all=context + rows - window,
                # end of the columns that are in the cache
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
            active = cutlass.min(
                (packed_rows - first_packed + WARPGROUP_ROWS - 1) // WARPGROUP_ROWS,
                Int32(config.warpgroups),
            )
            if thread == 0:
                for stage in cutlass.range_constexpr(config.stages):
                    cute.arch.mbarrier_init(barriers + stage, 1)
                    if cutlass.const_expr(config.specialised):
                        empty = barriers + config.stages + stage
                        cute.arch.mbarrier_init(empty, active * WARPS)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()

            # A value tile has the byte layout of a key tile.
            key_boxes = cute.make_tensor(s_key.iterator, box_layout.outer)
            value_boxes = cute.make_tensor(s_value.iterator, box_layout.outer)
            ring = (copy_key, copy_value, keys, values, key_boxes, value_boxes, barriers)
            if cutlass.const_expr(config.specialised):
                if b.warp == config.mma_threads // 32:
                    self.produce(p, b, begin, end, *ring)
                else:
                    self.consume(
                        p, b, begin, end, slot, part, parts, mma_scores, mma_output,
                        s_query, s_key, s_value, s_words, s_parents, barriers,
                    )  # fmt: skip
            else:
                self.run_basic(
                    p, b, begin, end, slot, part, parts, mma_scores, mma_output,
                    s_query, s_key, s_value, s_words, s_parents, *ring,
                )  # fmt: skip
