# SPDX-License-Identifier: Apache-2.0
"""Tile shapes and variants of the SM90 kernel. Needs neither cutlass nor a GPU."""

from dataclasses import dataclass

from ..cuda_contract import MAX_TREE_ROWS

# Columns of a tile: one 64-bit ancestor window per row, one m64n64 accumulator per warpgroup.
TILE_N = 64
WORD_BITS = 64
# Words of a row's mask plus one of zeros, because a window may straddle the last word.
MASK_WORDS = -(-MAX_TREE_ROWS // WORD_BITS) + 1
# Rows of one warpgroup's accumulator.
WARPGROUP_ROWS = 64
WARPGROUP_THREADS = 128
# A smaller part costs more for its partial result than it saves.
MIN_SPLIT_TILES = 2
# Most parts of a tree that is the only one of its batch.
MAX_SPLITS = 64
# Candidate numbers of waves for splitting all tiles, finest first. A grid has slots for the parts
# of the finest. More waves would cost more in merging and memory than they gain in balance.
WAVES = (4, 3, 2, 1)
# In a shorter context, balancing an uneven batch gains less than a merge costs.
MIN_UNEVEN_TILES = 32
# Overhead of a block of an unsplit and of a split tree, in tiles. Assumed, not measured: launch,
# scheduling, query and first loads count as two tiles. A partial result counts as two more, because
# writing and reading 64 rows of float32 moves as many bytes as two tiles of keys and values.
WHOLE_COST, CUT_COST = 2, 4

HEAD_DIMS = (64, 96, 128)
# Longer windows are clamped to this; distances up to it fit 32 bits.
MAX_WINDOW = 1 << 30
DTYPES = ("bfloat16", "float16")
MIN_PAGE, MAX_PAGE = 16, 1024
# Slots of a TMA box: the smallest page, or a whole tile.
BOXES = (MIN_PAGE, TILE_N)

# Shared memory of compute capability 9.0 in bytes: limit per block, total per SM, and what the
# driver reserves per block.
SHARED_LIMIT = 227 * 1024
SHARED_TOTAL = 228 * 1024
SHARED_RESERVED = 1024

# MMA warpgroups of a block: one that also loads, or two beside a producer warp. Two fit the packed
# rows of 31 and of 63 nodes (G = 4) without a warpgroup of padding. With three, a thread would have
# too few registers.
WARPGROUP_CHOICES = (1, 2)
# The producer waits for the cp.async copies of a masked tile this many tiles later.
CP_ASYNC_LAG = 2
# K/V tiles in shared memory, by head size and warpgroups. A single warpgroup cannot overlap loads,
# GEMMs and softmax, so its stages leave room for two blocks per SM. Two with a producer fill an SM.
STAGES = {
    (64, 1): 6, (96, 1): 4, (128, 1): 2,
    (64, 2): 8, (96, 2): 6, (128, 2): 5,
}  # fmt: skip


def band_columns(head_dim: int) -> int:
    """Returns the elements of a band of a tile: 128 bytes, or 64 if 128 does not divide a row."""
    return 64 if head_dim % 64 == 0 else 32


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled variant of the attention kernel.

    Attributes:
        head_dim: Dh, of HEAD_DIMS.
        dtype: of DTYPES; queries, keys, values and output.
        warpgroups: MMA warpgroups, 64 packed rows each. Two share each K/V tile, which saves L2
            reads of large trees; one avoids padding in small trees.
        box: slots of a TMA box for full tiles: a whole tile or a smaller page.
        window: a row attends only the last positions before it.
    """

    head_dim: int
    dtype: str
    warpgroups: int
    box: int
    window: bool = False

    def __post_init__(self) -> None:
        assert self.head_dim in HEAD_DIMS, self.head_dim
        assert self.dtype in DTYPES, self.dtype
        assert self.warpgroups in WARPGROUP_CHOICES, self.warpgroups
        assert self.box in BOXES, self.box
        least = CP_ASYNC_LAG + 2 if self.specialised else 2
        assert self.stages >= least and self.shared_bytes <= SHARED_LIMIT, self

    @property
    def name(self) -> str:
        shape = f"d{self.head_dim}_{self.dtype}_w{self.warpgroups}_box{self.box}"
        return f"tree_attn_sm90_{shape}{'_window' * self.window}"

    @property
    def specialised(self) -> bool:
        """Whether a producer warp loads, see `mainloop_specialised`."""
        return self.warpgroups > 1

    @property
    def stages(self) -> int:
        """K/V tiles in shared memory."""
        return STAGES[self.head_dim, self.warpgroups]

    @property
    def boxes(self) -> int:
        """TMA boxes of a full tile."""
        return TILE_N // self.box

    @property
    def tile_m(self) -> int:
        """Packed rows (tree row x query head of the group) of a block."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def mma_threads(self) -> int:
        """Threads of the MMA warpgroups."""
        return WARPGROUP_THREADS * self.warpgroups

    @property
    def threads(self) -> int:
        return self.mma_threads + 32 * self.specialised

    @property
    def ctas_per_sm(self) -> int:
        """Blocks that an SM runs at once, at most two."""
        if self.warpgroups > 1:
            return 1  # limited by registers
        return min(2, SHARED_TOTAL // (self.shared_bytes + SHARED_RESERVED))

    @property
    def tile_bytes(self) -> int:
        """Bytes of one K or V tile."""
        return TILE_N * self.head_dim * 2

    @property
    def barriers(self) -> int:
        """mbarriers: one full and, with a producer, one empty barrier per stage."""
        return self.stages * (1 + self.specialised)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: Q, stages of K and V, mask words, parents, barriers, work tile."""
        query = self.tile_m * self.head_dim * 2
        words = self.tile_m * MASK_WORDS * 8
        parents = -(-MAX_TREE_ROWS * 4 // 128) * 128
        work_tile = 16
        return query + 2 * self.stages * self.tile_bytes + words + parents + 128 + work_tile


@dataclass(frozen=True)
class CombineConfig:
    """One compiled variant of the combine kernel."""

    head_dim: int
    dtype: str

    @property
    def name(self) -> str:
        return f"combine_d{self.head_dim}_{self.dtype}"

    @property
    def threads(self) -> int:
        return 128

    @property
    def shared_bytes(self) -> int:
        return 0


def all_configs() -> list[ForwardConfig | CombineConfig]:
    """Returns every variant."""
    forward = [
        ForwardConfig(head_dim, dtype, warpgroups, box, window=window)
        for window in (False, True)
        for head_dim in HEAD_DIMS
        for dtype in DTYPES
        for warpgroups in WARPGROUP_CHOICES
        for box in BOXES
    ]
    combine = [CombineConfig(head_dim, dtype) for head_dim in HEAD_DIMS for dtype in DTYPES]
    return [*forward, *combine]
