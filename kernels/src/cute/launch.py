# SPDX-License-Identifier: Apache-2.0
"""Plans the launches of a call: variant, grid, split, arguments.

Needs neither cutlass nor a GPU. Reads no tensor values, so planning needs no host synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..cuda_contract import MAX_TREE_ROWS
from ..features import PLAIN, AttnFeatures, FeatureKind
from ..metadata import TreeAttnMetadata
from .config import (
    BOXES,
    DTYPES,
    HEAD_DIMS,
    MAX_PAGE,
    MAX_SPLITS,
    MAX_WINDOW,
    MIN_PAGE,
    MIN_SPLIT_TILES,
    MIN_UNEVEN_TILES,
    TILE_N,
    WARPGROUP_CHOICES,
    WARPGROUP_ROWS,
    WAVES,
    CombineConfig,
    ForwardConfig,
    band_columns,
)
from .launch_params import COMBINE_PARAMETERS, FORWARD_PARAMETERS, SCALAR_DTYPES

# Fill of the last wave, relative to the best split, that is good enough.
GOOD_FILL = 0.85


@dataclass(frozen=True)
class TensorMapSpec:
    """Fields of a TMA descriptor: extents and strides in elements, fastest dimension first."""

    address: int
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `arguments` omit the variant's empty parameters."""

    config: ForwardConfig | CombineConfig
    grid: tuple[int, int, int]
    arguments: tuple[TensorMapSpec | int | float, ...]


class Arguments(NamedTuple):
    """The arguments of a call; see `cuda_contract`."""

    # [T, Hq, Dh]
    query: torch.Tensor
    # [num_blocks, block_size, Hkv, Dh]
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    # [T, Hq, Dh]
    output: torch.Tensor
    meta: TreeAttnMetadata
    scale: float
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None = None
    tail_value: torch.Tensor | None = None
    features: AttnFeatures = PLAIN


# (parts, rows, Hq, Dh, R) -> float32 [parts, rows, Hq, Dh] and [parts, rows, Hq], int32 [R, 2]. The
# callable keeps them alive.
Workspace = Callable[[int, int, int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def unsupported(head_dim: int, dtype: torch.dtype, block_size: int) -> str | None:
    """Returns why no variant supports these, or None."""
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if str(dtype).removeprefix("torch.") not in DTYPES:
        return f"{dtype} is not one of {', '.join(DTYPES)}"
    if block_size & (block_size - 1) or not MIN_PAGE <= block_size <= MAX_PAGE:
        return f"block size {block_size} is not a power of two from {MIN_PAGE} to {MAX_PAGE}"
    return None


def unsupported_feature(kind: FeatureKind) -> str | None:
    """Returns which layers no variant supports, or None. Every variant supports sinks."""
    if kind.quantised_cache:
        return "layers with a quantised cache"
    return "layers with a soft cap or ALiBi" if kind.soft_cap or kind.alibi else None


def choose_splits(
    blocks: int, tiles: int, resident_ctas: int, min_tiles: int = MIN_SPLIT_TILES
) -> int:
    """Returns the parts per tree for an unsplit grid of `blocks` over at most `tiles` tiles.

    The device runs `resident_ctas` blocks at once, and a part has at least `min_tiles`. Returns the
    smallest number of parts whose waves are about as full as those of the best number.
    """
    if blocks == 0:
        return 1
    most = max(1, min(MAX_SPLITS, tiles // min_tiles, WAVES[0] * resident_ctas // blocks))

    def fill(splits: int) -> float:
        waves = blocks * splits / resident_ctas
        return waves / math.ceil(waves)

    best = max(fill(splits) for splits in range(1, most + 1))
    return next(s for s in range(1, most + 1) if fill(s) >= GOOD_FILL * best)


@dataclass(frozen=True)
class GridSplit:
    """How the trees of a batch are split over a grid; `tile_scheduler` assigns parts to blocks."""

    forced_parts: int
    """Target number of parts of all trees together; 0: the device chooses it by the lengths."""
    slots: int
    """Slots of the grid; equal to the number of trees if no tree is split."""
    parts: int
    """Most parts of all split trees together."""


def split_grid(
    trees: int,
    blocks: int,
    tiles: int,
    resident_ctas: int,
    splits: int | None,
    min_tiles: int = MIN_SPLIT_TILES,
) -> GridSplit:
    """Returns the split of `trees` trees of at most `tiles` tiles and `blocks` blocks each.

    The device runs `resident_ctas` blocks at once. `splits` forces the parts of equally long trees.
    Only the device knows each tree's length, so there are slots for parts of long trees even if
    equally long ones would not be split.
    """
    if splits is None and trees > 1:
        forced_parts, extra = 0, -(-WAVES[0] * resident_ctas // blocks)
        even = choose_splits(trees * blocks, tiles, resident_ctas, min_tiles)
        cut = extra > 1 and (even > 1 or tiles >= MIN_UNEVEN_TILES)
    else:
        even = splits or choose_splits(blocks, tiles, resident_ctas, min_tiles)
        forced_parts = extra = trees * even
        cut = even > 1
    if not cut:
        return GridSplit(0, trees, 0)
    # The part size of the kernel is at least that of `extra` equal parts. A tree that is split has
    # more than five quarters of the part size, and its number of parts exceeds its length in part
    # sizes by at most three quarters.
    cut_trees = min(trees, (4 * extra - 1) // 5)
    most = extra + 3 * cut_trees // 4
    assert max(most, trees) < 1 << 15, "the kernel counts parts and trees in half an integer"
    return GridSplit(forced_parts, trees + extra, most)


@dataclass(frozen=True)
class Bounds:
    """Upper bounds of a step, rounded up so that more steps have the same ones."""

    rows: int
    tiles: int

    @classmethod
    def of(cls, rows: int, context: int, group: int) -> Bounds:
        """
        Args:
            rows: most rows of a tree; rounded up to full blocks.
            context: longest context; its tiles are rounded up to a power of two.
            group: query heads of a KV head.
        """
        tile_m = WARPGROUP_ROWS * warpgroups_for(rows * group)
        most = -(-rows * group // tile_m) * tile_m // group
        return cls(min(most, MAX_TREE_ROWS), 1 << (-(-(context + rows) // TILE_N)).bit_length())


def box_of(block_size: int) -> int:
    """Returns the slots of a TMA box, which must not cross a page."""
    return max(box for box in BOXES if box <= block_size)


def warpgroups_for(packed: int) -> int:
    """Returns the MMA warpgroups of a block for trees of `packed` packed rows.

    Trees that fit one warpgroup are memory-bound: a producer warp would not speed them up.
    """
    small, large = WARPGROUP_CHOICES
    return small if packed <= small * WARPGROUP_ROWS else large


class Call:
    """The launches of calls that differ only in addresses, number of trees and their lengths."""

    def __init__(self, arguments: Arguments, num_sms: int, splits: int | None = None) -> None:
        query, key_cache, value_cache, output, meta, scale, tail_key, tail_value, features = (
            arguments
        )
        _, self.num_heads, self.head_dim = query.shape
        block_size, self.num_kv_heads = key_cache.shape[1:3]
        dtype = str(query.dtype).removeprefix("torch.")
        assert unsupported(self.head_dim, query.dtype, block_size) is None
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)
        assert (tail_key is None) == (tail_value is None)
        assert unsupported_feature(features.kind) is None
        assert not (features.window and meta.mask_kind == "full"), "rows without a depth"
        for tensor in (query, key_cache, value_cache, output, tail_key, tail_value):
            assert tensor is None or _is_loadable(tensor, query.dtype), "dtype, stride or alignment"
        dense = tail_key is not None
        group = self.num_heads // self.num_kv_heads
        self.bounds = Bounds.of(meta.max_rows, meta.max_context, group)
        window = min(features.window, MAX_WINDOW)
        # A dense tail begins at a tile boundary and a window within a tile. Each adds one tile.
        self.tiles = self.bounds.tiles + dense
        if window:
            self.tiles = min(self.tiles, -(-(window + self.bounds.rows) // TILE_N) + 1 + dense)
        packed = self.bounds.rows * group
        self.config = ForwardConfig(
            self.head_dim,
            dtype,
            warpgroups_for(packed),
            box_of(block_size),
            window=bool(window),
        )
        self.merge = CombineConfig(self.head_dim, dtype)
        self.row_blocks = -(-packed // self.config.tile_m)
        self.resident_ctas = num_sms * self.config.ctas_per_sm
        self.splits = splits
        box = self.config.box
        self.descriptors = (_tensor_map(key_cache, box), _tensor_map(value_cache, box))
        self._grid_splits: dict[int, GridSplit] = {}
        self.fixed = {
            "key": key_cache.data_ptr(),
            "value": value_cache.data_ptr(),
            "sinks": _address(features.sinks),
            "query_row": query.stride(0),
            "query_head": query.stride(1),
            "output_row": output.stride(0),
            "output_head": output.stride(1),
            "key_block": key_cache.stride(0),
            "key_slot": key_cache.stride(1),
            "key_head": key_cache.stride(2),
            "value_block": value_cache.stride(0),
            "value_slot": value_cache.stride(1),
            "value_head": value_cache.stride(2),
            "tail_key_row": tail_key.stride(0) if dense else 0,
            "tail_key_head": tail_key.stride(1) if dense else 0,
            "tail_value_row": tail_value.stride(0) if dense else 0,
            "tail_value_head": tail_value.stride(1) if dense else 0,
            "num_kv_heads": self.num_kv_heads,
            "num_heads": self.num_heads,
            "resident_ctas": self.resident_ctas,
            "group": group,
            "page_shift": block_size.bit_length() - 1,
            "table_width": meta.block_table.shape[1],
            "part_rows": self.bounds.rows,
            "full": int(meta.mask_kind == "full"),
            "dense": int(dense),
            "sink_dtype": _dtype_index(features.sinks),
            "window": window,
            "scale_log2": scale * math.log2(math.e),
        }

    def grid_split(self, num_trees: int) -> GridSplit:
        """Returns how `num_trees` trees are split over the grid."""
        found = self._grid_splits.get(num_trees)
        if found is None:
            blocks = self.num_kv_heads * self.row_blocks
            found = split_grid(num_trees, blocks, self.tiles, self.resident_ctas, self.splits)
            self._grid_splits[num_trees] = found
        return found

    def step(self, arguments: Arguments, workspace: Workspace) -> dict[str, int]:
        """Returns the parameters that differ between calls."""
        meta = arguments.meta
        split = self.grid_split(meta.num_trees)
        parts = (None, None, None)
        if split.parts:
            shape = (self.bounds.rows, self.num_heads, self.head_dim)
            parts = workspace(split.parts, *shape, meta.num_trees)
        return {
            "query": arguments.query.data_ptr(),
            "output": arguments.output.data_ptr(),
            "tail_key": _address(arguments.tail_key),
            "tail_value": _address(arguments.tail_value),
            "plan": meta.plan.data_ptr(),
            "parents": meta.parent_rows.data_ptr(),
            "table": meta.block_table.data_ptr(),
            "part_out": _address(parts[0]),
            "part_lse": _address(parts[1]),
            "part_record": _address(parts[2]),
            "num_trees": meta.num_trees,
            "forced_parts": split.forced_parts,
            "slots": split.slots,
        }

    def grids(self, num_trees: int) -> list[tuple[int, int, int]]:
        """Returns the grids of the launches: attention and, if a tree may be split, combine."""
        split = self.grid_split(num_trees)
        grids = [(self.row_blocks, self.num_kv_heads, split.slots)]
        if split.parts:
            items = self.merge.threads // 32
            grids.append((-(-self.bounds.rows * self.num_heads // items), num_trees, 1))
        return grids


def call_key(arguments: Arguments, splits: int | None) -> tuple:
    """Returns a key that is equal for calls that one `Call` can serve."""
    query, key_cache, value_cache, output, meta, scale, tail_key, tail_value, features = arguments
    group = query.shape[1] // key_cache.shape[2]
    return (
        query.dtype,
        query.device.index,
        Bounds.of(meta.max_rows, meta.max_context, group),
        *((t.data_ptr(), t.shape, t.stride()) for t in (key_cache, value_cache)),
        *(
            None if t is None else (t.shape[1:], t.stride())
            for t in (query, output, tail_key, tail_value)
        ),
        meta.block_table.shape[1],
        meta.mask_kind,
        scale,
        splits,
        features.kind,
        None if features.sinks is None else (features.sinks.data_ptr(), features.sinks.dtype),
    )


def plan_launches(
    arguments: Arguments, num_sms: int, workspace: Workspace, splits: int | None = None
) -> list[Launch]:
    """Returns the launches of a call in order. `splits` overrides the default."""
    meta = arguments.meta
    if meta.num_trees == 0 or meta.max_rows == 0:
        return []
    call = Call(arguments, num_sms, splits)
    values = call.fixed | call.step(arguments, workspace)
    forward, *merge = call.grids(meta.num_trees)
    launches = [
        Launch(
            call.config,
            forward,
            (*call.descriptors, *(values[name] for name, _ in FORWARD_PARAMETERS)),
        )
    ]
    for grid in merge:
        merged = tuple(values[name] for name, _ in COMBINE_PARAMETERS)
        launches.append(Launch(call.merge, grid, merged))
    return launches


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dtype_index(
    # [Hq], contiguous
    numbers: torch.Tensor | None,
) -> int:
    """Returns the index of the dtype in SCALAR_DTYPES; 0 for None."""
    if numbers is None:
        return 0
    assert numbers.is_contiguous(), numbers.stride()
    return SCALAR_DTYPES.index(str(numbers.dtype).removeprefix("torch."))


def _is_loadable(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether rows of the tensor can be read 16 bytes at a time."""
    return (
        tensor.dtype == dtype
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(
            stride % 8 == 0
            for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
            if size > 1
        )
    )


def _tensor_map(
    # [num_blocks, block_size, Hkv, Dh]
    cache: torch.Tensor,
    box: int,
) -> TensorMapSpec:
    """Returns the TMA descriptor of a cache with boxes of `box` slots.

    Dimensions, fastest first: element, slot, head, block.
    """
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    band = band_columns(head_dim)
    strides = []
    for size, stride in ((block_size, 1), (num_kv_heads, 2), (num_blocks, 0)):
        # torch allows any stride for a dimension of size 1; a descriptor does not.
        strides.append(cache.stride(stride) if size > 1 else head_dim)
    return TensorMapSpec(
        cache.data_ptr(),
        str(cache.dtype).removeprefix("torch."),
        (head_dim, block_size, num_kv_heads, num_blocks),
        (1, *strides),
        (band, box, 1, 1),
        2 * band,
    )
