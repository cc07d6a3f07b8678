# SPDX-License-Identifier: Apache-2.0
"""Merges the partial outputs of a split tree, weighted by exp2 of their LSE (in base two).

One warp handles one (tree row, head). The attention kernel itself finishes trees of one part.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..cuda_contract import (
    MAX_TREE_ROWS,
    PLAN_ROW_COUNT,
    PLAN_ROW_START,
)
from . import tile_scheduler
from .access import ELEMENT_BYTES, element_type, global_array, int32_at
from .config import CombineConfig
from .forward_sm90 import placeholders
from .launch_params import COMBINE_PARAMETERS

LANES = tile_scheduler.LANES


class CombineSplits:
    """The combine kernel of one `CombineConfig`."""

    def __init__(self, config: CombineConfig) -> None:
        self.config = config
        self.dtype = element_type(config.dtype)

    @cute.jit
    def __call__(self, stream):
        """The traced host function. It is never run."""
        self.kernel(placeholders(COMBINE_PARAMETERS)).launch(
            grid=(1, 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, p):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, tree, _ = cute.arch.block_idx()
        lane = thread % LANES
        item = block * (config.threads // LANES) + thread // LANES
        # The part record of a tree without rows is never written, so it must not be read.
        rows = cutlass.min(
            int32_at(p.plan, PLAN_ROW_COUNT * p.num_trees + tree), Int32(MAX_TREE_ROWS)
        )
        parts = Int32(0)
        if item < rows * p.num_heads:
            parts = int32_at(p.part_record, 2 * tree + 1)
        if parts > 1:
            slot = int32_at(p.part_record, 2 * tree)
            row = item // p.num_heads
            head = item % p.num_heads
            row_start = int32_at(p.plan, PLAN_ROW_START * p.num_trees + tree)
            stride = Int64(p.part_rows) * p.num_heads
            first_part = (Int64(slot) * p.part_rows + row) * p.num_heads + head
            highest = -Float32.inf
            # One part per lane: serial loads would add up their latencies.
            for other in cutlass.range(lane, parts, LANES, unroll=1):
                address = p.part_lse + (first_part + other * stride) * 4
                highest = cute.arch.fmax(highest, global_array(Float32, address, 1)[0])
            for i in cutlass.range_constexpr(5):
                other_half = cute.arch.shuffle_sync_bfly(highest, offset=1 << i)
                highest = cute.arch.fmax(highest, other_half)
            # Some part contains the row's own column, so `highest` is finite.
            merged = cute.make_rmem_tensor(cute.make_layout(config.head_dim // LANES), Float32)
            merged.fill(0.0)
            weights = Float32(0.0)
            for each in cutlass.range(parts, unroll=4):
                index = first_part + each * stride
                lse = global_array(Float32, p.part_lse + index * 4, 1)[0]
                weight = cute.math.exp2(lse - highest, fastmath=True)
                weights = weights + weight
                first = p.part_out + (index * config.head_dim + lane) * 4
                for i in cutlass.range_constexpr(config.head_dim // LANES):
                    value = global_array(Float32, first + 4 * LANES * i, 1)[0]
                    merged[i] = merged[i] + weight * value
            inverse = 1.0 / weights
            element = Int64(row_start + row) * p.output_row + Int64(head) * p.output_head + lane
            for i in cutlass.range_constexpr(config.head_dim // LANES):
                address = p.output + (element + LANES * i) * ELEMENT_BYTES
                out = global_array(self.dtype, address, 1)
                out[0] = (merged[i] * inverse).to(self.dtype)
