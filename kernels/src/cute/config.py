# SPDX-License-Identifier: Apache-2.0
"""Tile shapes and variants of the SM90 kernel; plain Python, needs neither cutlass nor a GPU."""

from dataclasses import dataclass

from ..cuda_contract import MAX_TREE_ROWS

# Columns of a tile: one 64-bit ancestor window a row, and one m64n64 accumulator a warpgroup.
TILE_N = 64
WORD_BITS = 64
# Words of a row's mask, and one of zeros so that a window may straddle the last.
MASK_WORDS = -(-MAX_TREE_ROWS // WORD_BITS) + 1
# Rows of one warpgroup's accumulator.
WARPGROUP_ROWS = 64
WARPGROUP_THREADS = 128
# A split below this is not worth its partial result.
MIN_SPLIT_TILES = 2
# Parts of a tree that is alone.
MAX_SPLITS = 64
# Waves of blocks that all tiles may be cut into, finest first; a grid has slots for the parts of
# the finest. More would cost more to merge than they balance, and memory for partial results.
WAVES = (4, 3, 2, 1)
# Below this an uneven batch is not worth a merge.
MIN_UNEVEN_TILES = 32
# What a block takes besides its tiles, in tiles of the same block. Assumed, not measured: launch,
# schedule, query and first loads of a block as two tiles; a partial result as two more, as writing
# and reading 64 rows of floats moves the bytes of two tiles of keys and values.
WHOLE_COST, CUT_COST = 2, 4

HEAD_DIMS = (64, 96, 128)
# Longer windows are as good as none, and positions within this much of each other fit 32 bits.
MAX_WINDOW = 1 << 30
DTYPES = ("bfloat16", "float16")
MIN_PAGE, MAX_PAGE = 16, 1024
# Slots of a box of the copy engine: of the smallest page, and a whole tile.
BOXES = (MIN_PAGE, TILE_N)

# Shared memory of compute capability 9.0 in bytes: most of a block, all of a multiprocessor, and
# what the system takes of it for each block.
SHARED_LIMIT = 227 * 1024
SHARED_TOTAL = 228 * 1024
SHARED_RESERVED = 1024

WARPGROUP_CHOICES = (1, 3)
# With a producer. Two take the packed rows of 31 and of 63 nodes (G = 4) without a warpgroup of
# padding; three would leave each thread hardly the registers that it needs.
SPECIALISED_WARPGROUPS = 2
# (warpgroups, specialised) of what is compiled
SCHEMES = (*((w, False) for w in WARPGROUP_CHOICES), (SPECIALISED_WARPGROUPS, True))
# Tiles between the copies of a masked tile and the wait for them, with a producer.
CP_ASYNC_LAG = 2
# K/V tiles in shared memory, by head size and warpgroups. One warpgroup alone cannot load,
# multiply and take exponentials at once, so two blocks share a multiprocessor and the stages are
# those that leave room for both; three warpgroups fill it by themselves.
DEFAULT_STAGES = {
    (64, 1): 6, (96, 1): 4, (128, 1): 2,
    (64, 2): 8, (96, 2): 6, (128, 2): 5,
    (64, 3): 6, (96, 3): 5, (128, 3): 5,
}  # fmt: skip


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled variant of the attention kernel.

    Attributes:
        head_dim: Dh, of HEAD_DIMS.
        dtype: of DTYPES; queries, keys, values and output.
        warpgroups: 64 packed rows each. More of them share each K/V tile, so that large trees
            read the L2 less often; one keeps small trees from computing padding.
        box: slots of a box by which the bulk tensor copy engine brings full tiles: all of a tile,
            or all of a smaller page; 0 takes cp.async instead.
        stages: K/V tiles in shared memory, of which one is computed on; 0 takes the default.
        window: rows attend the last positions before them alone.
        soft_cap: scores pass through a tanh.
        alibi: scores fall with the distance of positions.
        specialised: a warp of its own loads, and warpgroups run apart, see `specialised`.
    """

    head_dim: int
    dtype: str
    warpgroups: int
    box: int
    stages: int = 0
    window: bool = False
    soft_cap: bool = False
    alibi: bool = False
    specialised: bool = False

    def __post_init__(self) -> None:
        assert self.head_dim in HEAD_DIMS, self.head_dim
        assert self.dtype in DTYPES, self.dtype
        if self.specialised:
            assert self.warpgroups == SPECIALISED_WARPGROUPS and self.box, self
        else:
            assert self.warpgroups in WARPGROUP_CHOICES, self.warpgroups
        assert self.box in (0, *BOXES), self.box
        if self.stages == 0:
            default = DEFAULT_STAGES[self.head_dim, self.warpgroups]
            object.__setattr__(self, "stages", default)
        least = CP_ASYNC_LAG + 2 if self.specialised else 2
        assert self.stages >= least and self.shared_bytes <= SHARED_LIMIT, self

    @property
    def name(self) -> str:
        path = f"box{self.box}" if self.box else "cpasync"
        shape = f"d{self.head_dim}_{self.dtype}_w{self.warpgroups}_s{self.stages}"
        features = "".join(f"_{f}" for f in ("window", "soft_cap", "alibi") if getattr(self, f))
        scheme = "_ws" if self.specialised else ""
        return f"tree_attn_sm90_{shape}_{path}{scheme}{features}"

    @property
    def needs_positions(self) -> bool:
        """Whether it matters how far a key is from a row."""
        return self.window or self.alibi

    @property
    def prescaled(self) -> bool:
        """Whether scores are scaled before the softmax."""
        return self.soft_cap or self.alibi

    @property
    def boxes(self) -> int:
        """Boxes of a full tile, one below another; 1 without."""
        return TILE_N // self.box if self.box else 1

    @property
    def tile_m(self) -> int:
        """Packed rows (tree row x query head of the group) of a block."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def mma_threads(self) -> int:
        """Threads that compute."""
        return WARPGROUP_THREADS * self.warpgroups

    @property
    def threads(self) -> int:
        return self.mma_threads + 32 * self.specialised

    @property
    def ctas_per_sm(self) -> int:
        """Blocks that run at once; more than two are not counted on."""
        if self.warpgroups > 1:
            return 1  # by registers
        return min(2, SHARED_TOTAL // (self.shared_bytes + SHARED_RESERVED))

    @property
    def tile_bytes(self) -> int:
        """Bytes of one K or V tile."""
        return TILE_N * self.head_dim * 2

    @property
    def barriers(self) -> int:
        """Barriers of the stages: filled and, with a producer, released."""
        return self.stages * (1 + self.specialised)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: Q, stages of K and V, mask words, parents, barriers, slot."""
        query = self.tile_m * self.head_dim * 2
        words = self.tile_m * MASK_WORDS * 8
        parents = -(-MAX_TREE_ROWS * 4 // 128) * 128
        work_tile = 16
        return query + 2 * self.stages * self.tile_bytes + words + parents + 128 + work_tile


@dataclass(frozen=True)
class CombineConfig:
    """One compiled variant of the step that merges splits; a warp a (row, head)."""

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
    """Every variant that is shipped. Soft caps and slopes are compiled where they are asked for."""
    forward = [
        ForwardConfig(head_dim, dtype, warpgroups, box, window=window, specialised=specialised)
        for window in (False, True)
        for head_dim in HEAD_DIMS
        for dtype in DTYPES
        for warpgroups, specialised in SCHEMES
        for box in BOXES
    ]
    combine = [CombineConfig(head_dim, dtype) for head_dim in HEAD_DIMS for dtype in DTYPES]
    return [*forward, *combine]


def tuning_configs() -> list[ForwardConfig]:
    """Variants worth measuring against the defaults, at the head size that is used most."""
    basic = [
        ForwardConfig(128, "bfloat16", warpgroups, box, stages)
        for box in (0, *BOXES)
        for warpgroups, stages in ((1, 4), (1, 6), (3, 3))
    ]
    return basic + [
        ForwardConfig(
            128, "bfloat16", SPECIALISED_WARPGROUPS, box, CP_ASYNC_LAG + 2, specialised=True
        )
        for box in BOXES
    ]
