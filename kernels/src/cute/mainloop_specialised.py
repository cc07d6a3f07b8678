# SPDX-License-Identifier: Apache-2.0
"""The warp-specialised main loop: a producer warp loads, MMA warpgroups compute.

    the producer:     wait until tile i - stages is released -> load tile i -> signal its arrival
    each warpgroup:   wait for tile i -> start S = Q K_i^T -> start O = O + P V_{i - 1}
                      -> wait for S -> mask, softmax -> wait for O -> release tile i - 1

The full barrier of a stage completes when its tile has arrived, the empty barrier when every MMA
warp has finished with it. A warpgroup uses the keys of one tile and the values of the tile before,
so a GEMM is in flight during each softmax. With stages for three more tiles, the warpgroups drift
apart, and the softmax of one overlaps the GEMMs of the other.

The producer signals a tile that it loads by cp.async CP_ASYNC_LAG tiles later: it waits for its own
copies, issues a proxy fence (wgmma reads by another proxy than cp.async writes), then arrives. It
loads tile i after the release of tile i - stages, which requires the arrival of tile
i - stages + 1. Hence at least CP_ASYNC_LAG + 2 stages.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from . import gemms, pages, softmax
from .config import CP_ASYNC_LAG, TILE_N, WARPGROUP_ROWS, WARPGROUP_THREADS
from .loading import Loading
from .rows import Rows

LANES = 32
# Columns of a tile whose pages one lane of the producer reads.
COLUMNS_PER_LANE = TILE_N // LANES


class MainloopSpecialised(Loading, Rows):
    """Mixin of the attention kernel."""

    @cute.jit
    def produce(
        self, p, b, begin: Int32, end: Int32, copy_key, copy_value, keys, values,
        key_boxes: cute.Tensor, value_boxes: cute.Tensor, full_barriers,
    ):  # fmt: skip
        """Loads tiles `begin` to `end` - 1. Called by one warp."""
        config = self.config
        empty_barriers = full_barriers + config.stages
        page_ids = cute.make_rmem_tensor(cute.make_layout(config.boxes), Int32)
        self.load_box_pages(p, b, begin, end, page_ids)
        stage = Int32(0)
        # Completed passes over the ring.
        passes = Int32(0)
        for tile in cutlass.range(begin, end + CP_ASYNC_LAG, unroll=1):
            if tile < end:
                if passes > 0:
                    cute.arch.mbarrier_wait(empty_barriers + stage, passes - 1 & 1)
                if tile < b.full_end and tile >= b.full_begin:
                    self.copy_full_tile(
                        p, b, tile, stage, page_ids,
                        copy_key, copy_value, keys, values, key_boxes, value_boxes, full_barriers,
                    )  # fmt: skip
                else:
                    self.copy_columns_by_warp(p, b, tile, stage)
                self.load_box_pages(p, b, tile + 1, end, page_ids)
                stage = stage + 1
                if stage == config.stages:
                    stage = Int32(0)
                    passes = passes + 1
            # One group per tile, even if empty: waits count groups to identify a tile.
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(CP_ASYNC_LAG)
            arrived = tile - CP_ASYNC_LAG
            if arrived >= begin and (arrived >= b.full_end or arrived < b.full_begin):
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(full_barriers + (arrived - begin) % config.stages)

    @cute.jit
    def load_box_pages(self, p, b, tile: Int32, end: Int32, page_ids: cute.Tensor):
        """Reads the pages of a full tile's boxes; nothing for other tiles or after the last one."""
        if tile < end and tile < b.full_end and tile >= b.full_begin:
            for i in cutlass.range_constexpr(self.config.boxes):
                column = tile * TILE_N + i * self.config.box
                page_ids[i] = pages.column_page(
                    b.page_table, column, b.first_visible, b.cached, p.page_shift
                )

    @cute.jit
    def copy_columns_by_warp(self, p, b, tile: Int32, stage: Int32):
        """Copies K and V of a tile by cp.async, with zeros in columns without a row. One warp."""
        config = self.config
        per_row = cutlass.const_expr(config.head_dim // pages.CHUNK)
        lane = b.thread % LANES
        page_ids = cute.make_rmem_tensor(cute.make_layout(COLUMNS_PER_LANE), Int32)
        for i in cutlass.range_constexpr(COLUMNS_PER_LANE):
            column = tile * TILE_N + i * LANES + lane
            page_ids[i] = pages.column_page(
                b.page_table, column, b.first_visible, b.cached, p.page_shift
            )
        for i in cutlass.range_constexpr(COLUMNS_PER_LANE):
            for step in cutlass.range(per_row, unroll=4):
                row, chunk = pages.chunks_of(lane, step, LANES, per_row)
                page = cute.arch.shuffle_sync(page_ids[i], row)
                self.copy_chunks_of_column(p, b, tile, stage, i * LANES + row, chunk, page)

    @cute.jit
    def consume(
        self, p, b, begin: Int32, end: Int32, slot: Int32, part: Int32, parts: Int32,
        mma_scores: cute.TiledMma, mma_output: cute.TiledMma, s_query: cute.Tensor,
        s_key: cute.Tensor, s_value: cute.Tensor, s_words: cute.Tensor, s_parents: cute.Tensor,
        full_barriers,
    ):  # fmt: skip
        """Processes tiles `begin` to `end` - 1, at least one. Called by the MMA warpgroups."""
        config = self.config
        empty_barriers = full_barriers + config.stages
        self.load_query(p, b, Int32(s_query.iterator.toint()))
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(config.window):
            self.build_masks(p, b, s_parents, s_words)
        else:
            if end > b.full_end:
                self.build_masks(p, b, s_parents, s_words)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_mma_threads()

        wg = b.warp // 4
        wg_thread = b.thread % WARPGROUP_THREADS
        wg_packed = b.first_packed + wg * WARPGROUP_ROWS
        if wg_packed < b.packed_rows:
            frag = gemms.Fragments(
                config, self.dtype, mma_scores, mma_output, s_query, s_key, s_value
            )
            row_max = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Float32)
            row_sum = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Float32)
            # Factor from the previous reference score to the current one.
            correction = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Float32)
            positions = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Int32)
            if cutlass.const_expr(config.window):
                self.load_row_positions(p, b, s_words, wg_packed, wg_thread, positions)
            frag.output.fill(0.0)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)

            cute.arch.mbarrier_wait(full_barriers, 0)
            warpgroup.fence()
            gemms.start_qk(frag, wg, 0)
            warpgroup.wait_group(0)
            self.mask_scores(
                p, b, s_words, begin, wg_packed, wg_thread, positions, frag.flat_scores
            )
            softmax.online_softmax_deferred(
                frag.flat_scores, row_max, row_sum, correction, p.scale_log2
            )
            gemms.convert_weights_now(frag)
            stage = Int32(0)
            phase = Int32(0)
            for tile in cutlass.range(begin + 1, end, unroll=1):
                before = stage
                stage = stage + 1
                if stage == config.stages:
                    stage = Int32(0)
                    phase = phase ^ 1
                cute.arch.mbarrier_wait(full_barriers + stage, phase)
                warpgroup.fence()
                gemms.start_qk(frag, wg, stage)
                gemms.start_pv(frag, before)
                warpgroup.wait_group(1)
                self.mask_scores(
                    p, b, s_words, tile, wg_packed, wg_thread, positions, frag.flat_scores
                )
                softmax.online_softmax_deferred(
                    frag.flat_scores, row_max, row_sum, correction, p.scale_log2
                )
                warpgroup.wait_group(0)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty_barriers + before)
                softmax.rescale_output(frag.flat_output, correction)
                gemms.convert_weights_now(frag)
            warpgroup.fence()
            gemms.start_pv(frag, stage)
            warpgroup.wait_group(0)
            self.store(
                p, b, slot, part, parts, wg_packed, wg_thread, frag.output,
                row_max, row_sum,
            )  # fmt: skip
