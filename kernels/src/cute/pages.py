# SPDX-License-Identifier: Apache-2.0
"""Loading of tiles: where a column's K/V lie, where a chunk goes in shared memory, the copies.

A tile is rows of Dh elements in the layout that wgmma reads: bands of 64 columns (32 for a head
size of 96), each band rows x 128 (64) bytes, 16-byte chunks swizzled within groups of 8 rows. The
same bytes serve K as a K-major operand and V as an MN-major one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .config import TILE_N

CHUNK_BYTES = 16
CHUNK = 8  # elements


def band_columns(head_dim: int) -> int:
    """Columns of a band: the widest of 128 and 64 bytes that divides a row."""
    return 64 if head_dim % 64 == 0 else 32


@cute.jit
def chunk_offset(
    row: Int32, chunk: Int32, rows: cutlass.Constexpr, head_dim: cutlass.Constexpr
) -> Int32:
    """Byte offset of a row's 16-byte chunk in a tile of `rows` rows that starts swizzle-aligned."""
    band_bytes = cutlass.const_expr(2 * band_columns(head_dim))
    per_band = cutlass.const_expr(band_bytes // CHUNK_BYTES)
    linear = (
        chunk // per_band * (rows * band_bytes) + row * band_bytes + chunk % per_band * CHUNK_BYTES
    )
    # The chunk number within a row is exclusive-ored with the row number within its group.
    return linear ^ ((linear >> 3) & (band_bytes - CHUNK_BYTES))


@cute.jit
def copy_chunk(shared: Int32, address: Int64, valid: cutlass.Boolean):
    """Asynchronous copy of 16 bytes to shared memory; zeros, and no read, unless valid."""
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
    # columns from `first_visible` to `cached` lie in the cache
    first_visible: Int32,
    cached: Int32,
    page_shift: Int32,
) -> Int32:
    """Page of a column, 0 for one that is not in the cache (the table is not read for it)."""
    page = Int32(0)
    if column >= first_visible and column < cached:
        entry = table + Int64(column >> page_shift) * 4
        page = cute.make_tensor(
            cute.make_ptr(Int32, entry, cute.AddressSpace.gmem, assumed_align=4),
            cute.make_layout(1),
        )[0]
    return page


@cute.jit
def page_element(
    page: Int32,
    column: Int32,
    page_shift: Int32,
    block_stride: Int64,
    slot_stride: Int64,
) -> Int64:
    """Element offset of a cached column from the head's first element."""
    inside = column & ((Int32(1) << page_shift) - 1)
    return Int64(page) * block_stride + Int64(inside) * slot_stride


@cute.jit
def chunks_of(thread: Int32, step: Int32, threads: Int32, per_row: cutlass.Constexpr):
    """(row, chunk within the row) of a thread's copy number `step`; neighbours share a row."""
    index = step * threads + thread
    return index // per_row, index % per_row


def copies_per_thread(rows: int, head_dim: int, threads: int) -> int:
    """Copies of each thread to fill a tile; the last may be past the end."""
    return -(-rows * (head_dim // CHUNK) // threads)


assert TILE_N % 8 == 0, "a swizzle group is 8 rows"
