# SPDX-License-Identifier: Apache-2.0
"""Addresses of a column's K/V in the paged cache and of a 16-byte chunk in shared memory.

A tile is in the layout of wgmma operands: bands of 64 elements of Dh (32 for Dh 96), each of
rows x 128 (64) bytes, with 16-byte chunks swizzled within groups of 8 rows. K is read as a K-major
operand and V as an MN-major operand of the same layout.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .access import int32_at
from .config import TILE_N, band_columns

CHUNK_BYTES = 16
CHUNK = 8  # elements


@cute.jit
def chunk_offset(
    row: Int32, chunk: Int32, rows: cutlass.Constexpr, head_dim: cutlass.Constexpr
) -> Int32:
    """Returns the byte offset of a row's 16-byte chunk in a swizzle-aligned tile of `rows` rows."""
    band_bytes = cutlass.const_expr(2 * band_columns(head_dim))
    per_band = cutlass.const_expr(band_bytes // CHUNK_BYTES)
    linear = (
        chunk // per_band * (rows * band_bytes) + row * band_bytes + chunk % per_band * CHUNK_BYTES
    )
    # XOR the chunk number in the row with the row number in its group of 8.
    return linear ^ ((linear >> 3) & (band_bytes - CHUNK_BYTES))


@cute.jit
def copy_chunk(shared: Int32, address: Int64, valid: cutlass.Boolean):
    """Copies 16 bytes to shared memory by cp.async; if not valid, writes zeros, reads nothing."""
    size = Int32(CHUNK_BYTES) if valid else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[shared, address, size],
    )


@cute.jit
def column_page(
    # address of this request's row of the block table
    table: Int64,
    column: Int32,
    # columns from `first_visible` to `cached` may be read from the cache
    first_visible: Int32,
    cached: Int32,
    page_shift: Int32,
) -> Int32:
    """Returns the page of a column; 0, without a read, for a column outside the range."""
    page = Int32(0)
    if column >= first_visible and column < cached:
        page = int32_at(table, column >> page_shift)
    return page


@cute.jit
def page_element(
    page: Int32,
    column: Int32,
    page_shift: Int32,
    block_stride: Int64,
    slot_stride: Int64,
) -> Int64:
    """Returns the element offset of a cached column from the head's first element."""
    inside = column & ((Int32(1) << page_shift) - 1)
    return Int64(page) * block_stride + Int64(inside) * slot_stride


@cute.jit
def chunks_of(thread: Int32, step: Int32, threads: Int32, per_row: cutlass.Constexpr):
    """Returns (row, chunk in the row) of a thread's copy `step`; neighbours share a row."""
    index = step * threads + thread
    return index // per_row, index % per_row


def copies_per_thread(rows: int, head_dim: int, threads: int) -> int:
    """Returns the copies per thread to fill a tile; the last may be past its end."""
    return -(-rows * (head_dim // CHUNK) // threads)


assert TILE_N % 8 == 0, "a swizzle group is 8 rows"
