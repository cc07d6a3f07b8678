# SPDX-License-Identifier: Apache-2.0
"""The basic main loop of the attention kernel: all threads load and compute, tile by tile.

    wait for tile i -> barrier -> start loading tile i + stages - 1 -> S = Q K^T -> mask -> softmax
    -> O = O + P V

The barrier makes tile i's copies visible to all threads. It also ensures that every warpgroup has
finished tile i - 1, whose stage the next load overwrites.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from . import gemms, softmax
from .loading import Loading
from .rows import Rows


class MainloopBasic(Loading, Rows):
    """Mixin of the attention kernel."""

    @cute.jit
    def run_basic(
        self, p, b, begin: Int32, end: Int32, slot: Int32, part: Int32, parts: Int32,
        mma_scores: cute.TiledMma, mma_output: cute.TiledMma, s_query: cute.Tensor,
        s_key: cute.Tensor, s_value: cute.Tensor, s_words: cute.Tensor, s_parents: cute.Tensor,
        copy_key, copy_value, keys, values, key_boxes: cute.Tensor, value_boxes: cute.Tensor,
        full_barriers,
    ):  # fmt: skip
        """Processes tiles `begin` to `end` - 1 of the block's tree."""
        config = self.config
        # Pages of the next tile to load, read one tile ahead of its copies.
        page_ids = cute.make_rmem_tensor(cute.make_layout(self.page_copies), Int32)
        self.load_query(p, b, Int32(s_query.iterator.toint()))
        self.load_pages(p, b, begin, end, page_ids)
        for ahead in cutlass.range(config.stages - 1, unroll=1):
            self.load_tile(
                p, b, begin, begin + ahead, end, page_ids,
                copy_key, copy_value, keys, values, key_boxes, value_boxes, full_barriers,
            )  # fmt: skip
            self.load_pages(p, b, begin + ahead + 1, end, page_ids)
        if cutlass.const_expr(config.window):
            self.build_masks(p, b, s_parents, s_words)
        else:
            if end > b.full_end:
                self.build_masks(p, b, s_parents, s_words)

        frag = gemms.Fragments(config, self.dtype, mma_scores, mma_output, s_query, s_key, s_value)
        row_max = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Float32)
        row_sum = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Float32)
        positions = cute.make_rmem_tensor(cute.make_layout(softmax.ROWS), Int32)
        if cutlass.const_expr(config.window):
            self.load_row_positions(p, b, s_words, b.first_packed, b.thread, positions)
        frag.output.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)

        for tile in cutlass.range(begin, end, unroll=1):
            stage = (tile - begin) % config.stages
            cute.arch.cp_async_wait_group(config.stages - 2)
            cute.arch.fence_proxy("async.shared", space="cta")
            if tile < b.full_end and tile >= b.full_begin:
                cute.arch.mbarrier_wait(full_barriers + stage, (tile - begin) // config.stages & 1)
            cute.arch.sync_threads()
            self.load_tile(
                p, b, begin, tile + config.stages - 1, end, page_ids,
                copy_key, copy_value, keys, values, key_boxes, value_boxes, full_barriers,
            )  # fmt: skip
            self.load_pages(p, b, tile + config.stages, end, page_ids)
            warpgroup.fence()
            gemms.start_qk(frag, Int32(0), stage)
            warpgroup.wait_group(0)
            self.mask_scores(
                p, b, s_words, tile, b.first_packed, b.thread, positions, frag.flat_scores
            )
            softmax.online_softmax(
                frag.flat_scores, frag.flat_output, row_max, row_sum, p.scale_log2
            )
            gemms.convert_weights(frag)
            warpgroup.fence()
            gemms.start_pv(frag, stage)
            warpgroup.wait_group(0)
        self.store(
            p, b, slot, part, parts, b.first_packed, b.thread, frag.output,
            row_max, row_sum,
        )  # fmt: skip
