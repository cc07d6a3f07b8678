# SPDX-License-Identifier: Apache-2.0
"""Loads a block's query, K/V tiles and mask words to shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from . import mask, pages
from .access import ELEMENT_BYTES, int32_at
from .config import TILE_N, WARPGROUP_ROWS, ForwardConfig, band_columns


class Loading:
    """Mixin of the attention kernel. `p`: its parameters; `b`: a `Bundle` of the block's state."""

    config: ForwardConfig

    @property
    def column_copies(self) -> int:
        """cp.async copies per thread for one K or V tile."""
        return pages.copies_per_thread(TILE_N, self.config.head_dim, self.config.threads)

    @property
    def page_copies(self) -> int:
        """Page numbers that a thread holds per tile."""
        return max(self.column_copies, self.config.boxes)

    @cute.jit
    def load_query(self, p, b, shared: Int32):
        """Copies the block's packed rows of the query, with zeros after the tree's last row."""
        config = self.config
        per_row = cutlass.const_expr(config.head_dim // pages.CHUNK)
        tile_bytes = cutlass.const_expr(WARPGROUP_ROWS * config.head_dim * ELEMENT_BYTES)
        for step in cutlass.range_constexpr(
            pages.copies_per_thread(config.tile_m, config.head_dim, config.mma_threads)
        ):
            row, chunk = pages.chunks_of(b.thread, step, config.mma_threads, per_row)
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
        """Reads the page numbers of a tile for its later copies; none after the last tile."""
        cached = b.cached if tile < end else Int32(0)
        if tile < b.full_end and tile >= b.full_begin:
            # A TMA box lies in one page.
            for i in cutlass.range_constexpr(self.config.boxes):
                column = tile * TILE_N + i * self.config.box
                page_ids[i] = pages.column_page(
                    b.page_table, column, b.first_visible, cached, p.page_shift
                )
        else:
            self.load_column_pages(p, b, tile, cached, page_ids)

    @cute.jit
    def load_column_pages(self, p, b, tile: Int32, cached: Int32, page_ids: cute.Tensor):
        """Reads the page numbers of the columns that this thread copies."""
        config = self.config
        per_row = cutlass.const_expr(config.head_dim // pages.CHUNK)
        for step in cutlass.range_constexpr(self.column_copies):
            row, _ = pages.chunks_of(b.thread, step, config.threads, per_row)
            column = tile * TILE_N + row
            own = cached if row < TILE_N else Int32(0)
            page_ids[step] = pages.column_page(
                b.page_table, column, b.first_visible, own, p.page_shift
            )

    @cute.jit
    def load_tile(
        self, p, b, begin: Int32, tile: Int32, end: Int32, page_ids: cute.Tensor, copy_key,
        copy_value, keys, values, s_key: cute.Tensor, s_value: cute.Tensor, barriers,
    ):  # fmt: skip
        """Starts the copies of a tile, if it is before `end`, and commits their group."""
        config = self.config
        if tile < end:
            stage = (tile - begin) % config.stages
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
        # One group per tile, even if empty: waits count groups to identify a tile.
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_full_tile(
        self, p, b, tile: Int32, stage: Int32, page_ids: cute.Tensor, copy_key, copy_value,
        keys, values,
        # [box slots, band, boxes, bands, stages]
        s_key: cute.Tensor, s_value: cute.Tensor, barriers,
    ):  # fmt: skip
        """Copies K and V of a full tile by TMA, box by box and band by band. One warp."""
        config = self.config
        band = cutlass.const_expr(band_columns(config.head_dim))
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
        """Copies K and V of a tile by cp.async, zeros in columns without a row. All threads."""
        config = self.config
        per_row = cutlass.const_expr(config.head_dim // pages.CHUNK)
        for step in cutlass.range_constexpr(self.column_copies):
            row, chunk = pages.chunks_of(b.thread, step, config.threads, per_row)
            if row < TILE_N:
                self.copy_chunks_of_column(p, b, tile, stage, row, chunk, page_ids[step])

    @cute.jit
    def copy_chunks_of_column(
        self, p, b, tile: Int32, stage: Int32, row: Int32, chunk: Int32, page: Int32
    ):
        """Copies 16 bytes each of K and V for a tile's column `row`; zeros if it has no row."""
        config = self.config
        column = tile * TILE_N + row
        valid = column >= b.first_visible and column < b.cached
        key = b.key + ELEMENT_BYTES * pages.page_element(
            page, column, p.page_shift, p.key_block, p.key_slot
        )
        value = b.value + ELEMENT_BYTES * pages.page_element(
            page, column, p.page_shift, p.value_block, p.value_slot
        )
        tail_row = column - b.tail
        if p.dense == 1 and tail_row >= 0:
            valid = tail_row < b.rows
            inside = tail_row if valid else Int32(0)
            key = b.tail_key + ELEMENT_BYTES * (Int64(inside) * p.tail_key_row)
            value = b.tail_value + ELEMENT_BYTES * (Int64(inside) * p.tail_value_row)
        offset = stage * config.tile_bytes + pages.chunk_offset(row, chunk, TILE_N, config.head_dim)
        skip = chunk * pages.CHUNK_BYTES
        pages.copy_chunk(b.shared_key + offset, key + skip, valid)
        pages.copy_chunk(b.shared_value + offset, value + skip, valid)

    @cute.jit
    def sync_mma_threads(self):
        """A barrier of the MMA warpgroups."""
        if cutlass.const_expr(self.config.specialised):
            cute.arch.barrier(barrier_id=1, number_of_threads=self.config.mma_threads)
        else:
            cute.arch.sync_threads()

    @cute.jit
    def build_masks(self, p, b, s_parents: cute.Tensor, s_words: cute.Tensor):
        """Computes the mask words of the block's tree rows while its first tiles are in flight."""
        config = self.config
        if p.full == 0:
            for i in cutlass.range(b.thread, b.rows, config.mma_threads, unroll=1):
                s_parents[i] = int32_at(p.parents, b.mask_start + i)
        self.sync_mma_threads()
        first_row = b.first_packed // p.group
        last_row = (cutlass.min(b.first_packed + config.tile_m, b.packed_rows) - 1) // p.group
        for slot in cutlass.range(b.thread, last_row - first_row + 1, config.mma_threads, unroll=1):
            mask.write_words(s_parents, s_words, slot, first_row + slot, b.rows, p.full)
        self.sync_mma_threads()
