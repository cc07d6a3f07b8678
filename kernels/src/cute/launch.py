# SPDX-License-Identifier: Apache-2.0
"""From a call of the contract to launches: variant, grid, splits, arguments.

Needs neither cutlass nor a GPU, and reads no tensor: what a launch depends on is known on the
host without a synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..features import PLAIN, AttnFeatures, FeatureKind
from ..metadata import TreeAttnMetadata
from .config import (
    DTYPES,
    HEAD_DIMS,
    LONGEST_WINDOW,
    MAX_PAGE,
    MAX_SPLITS,
    MIN_PAGE,
    MIN_SPLIT_TILES,
    TILE_N,
    WARPGROUP_CHOICES,
    WARPGROUP_ROWS,
    CombineConfig,
    ForwardConfig,
)
from .launch_params import COMBINE_PARAMETERS, FORWARD_PARAMETERS, NUMBER_KINDS

# Splits that fill the device this well, relative to the best, are enough.
GOOD_FILL = 0.85


@dataclass(frozen=True)
class TensorMapSpec:
    """What a copy engine descriptor says: extents and strides in elements, fastest first."""

    address: int
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


@dataclass(frozen=True)
class Launch:
    """One kernel launch; `arguments` lack only the variant's empty parameters."""

    config: ForwardConfig | CombineConfig
    grid: tuple[int, int, int]
    arguments: tuple[TensorMapSpec | int | float, ...]


# (splits, M, Hq, Dh) -> float32 tensors [splits, M, Hq, Dh] and [splits, M, Hq] that stay alive
Workspace = Callable[[int, int, int, int], tuple[torch.Tensor, torch.Tensor]]


def unsupported(head_dim: int, dtype: torch.dtype, block_size: int) -> str | None:
    """Why no variant serves these, or None."""
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if str(dtype).removeprefix("torch.") not in DTYPES:
        return f"{dtype} is not one of {', '.join(DTYPES)}"
    if block_size & (block_size - 1) or not MIN_PAGE <= block_size <= MAX_PAGE:
        return f"block size {block_size} is not a power of two from {MIN_PAGE} to {MAX_PAGE}"
    return None


def choose_splits(blocks: int, tiles: int, places: int) -> int:
    """Splits of the columns for a grid of `blocks` (without splits) over at most `tiles` tiles.

    `places` blocks run at once. The fewest splits are taken that come close to the best filling
    of the waves that any number gives.
    """
    most = max(1, min(MAX_SPLITS, tiles // MIN_SPLIT_TILES))
    if blocks == 0:
        return 1

    def fill(splits: int) -> float:
        waves = blocks * splits / places
        return waves / math.ceil(waves)

    best = max(fill(splits) for splits in range(1, most + 1))
    return next(s for s in range(1, most + 1) if fill(s) >= GOOD_FILL * best)


def plan_launches(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, block_size, Hkv, Dh]
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh]
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None,
    tail_value: torch.Tensor | None,
    multiprocessors: int,
    workspace: Workspace,
    splits: int | None = None,
    stages: int = 0,
    features: AttnFeatures = PLAIN,
) -> list[Launch]:
    """The launches that answer a call, in order; see `cuda_contract`.

    `splits` and `stages` override what would be chosen.
    """
    _, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    dtype = str(query.dtype).removeprefix("torch.")
    assert unsupported(head_dim, query.dtype, block_size) is None
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert (tail_key is None) == (tail_value is None)
    if meta.num_trees == 0 or meta.max_rows == 0:
        return []
    assert features.key_scales is None, "8-bit caches"
    assert not (features.needs_positions and meta.mask_kind == "full"), "rows without a depth"
    window = min(features.window, LONGEST_WINDOW)
    dense = tail_key is not None
    for tensor in (query, key_cache, value_cache, output, tail_key, tail_value):
        assert tensor is None or _is_loadable(tensor, query.dtype), "dtype, stride or alignment"

    group = num_heads // num_kv_heads
    packed = meta.max_rows * group
    small, large = WARPGROUP_CHOICES
    config = ForwardConfig(
        head_dim,
        dtype,
        small if packed <= small * WARPGROUP_ROWS else large,
        block_size % TILE_N == 0,
        stages,
        **feature_flags(features.kind),
    )
    row_blocks = -(-packed // config.tile_m)
    # A dense tail begins at a tile boundary: one tile more at most.
    context = meta.max_context
    if window:
        context = min(context, window + TILE_N)
    tiles = -(-(context + meta.max_rows) // TILE_N) + dense
    if splits is None:
        places = multiprocessors * config.blocks_per_multiprocessor
        splits = choose_splits(meta.num_trees * num_kv_heads * row_blocks, tiles, places)
    # mask_start is a prefix sum of row_count, so that the buffer's size is no measure.
    part_rows = min(meta.num_rows, meta.num_trees * meta.max_rows)
    part_out = part_lse = None
    if splits > 1:
        part_out, part_lse = workspace(splits, part_rows, num_heads, head_dim)

    values = {
        "query": query.data_ptr(),
        "output": output.data_ptr(),
        "key": key_cache.data_ptr(),
        "value": value_cache.data_ptr(),
        "tail_key": tail_key.data_ptr() if dense else 0,
        "tail_value": tail_value.data_ptr() if dense else 0,
        "plan": meta.plan.data_ptr(),
        "parents": meta.parent_rows.data_ptr(),
        "table": meta.block_table.data_ptr(),
        "part_out": part_out.data_ptr() if splits > 1 else 0,
        "part_lse": part_lse.data_ptr() if splits > 1 else 0,
        "sinks": _address(features.sinks),
        "slopes": _address(features.alibi_slopes),
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
        "num_trees": meta.num_trees,
        "num_kv_heads": num_kv_heads,
        "num_heads": num_heads,
        "group": group,
        "splits": splits,
        "page_shift": block_size.bit_length() - 1,
        "table_width": meta.block_table.shape[1],
        "part_rows": part_rows,
        "full": int(meta.mask_kind == "full"),
        "dense": int(dense),
        "sink_kind": _number_kind(features.sinks),
        "slope_kind": _number_kind(features.alibi_slopes),
        "window": window,
        "cap_in": -2.0 / features.soft_cap if features.soft_cap else 0.0,
        "cap_out": features.soft_cap * math.log2(math.e),
        "scale_log2": scale * math.log2(math.e),
    }
    descriptors = (_tensor_map(key_cache), _tensor_map(value_cache)) if config.tma else ()
    launches = [
        Launch(
            config,
            (row_blocks, num_kv_heads * splits, meta.num_trees),
            (*descriptors, *(values[name] for name, _ in FORWARD_PARAMETERS)),
        )
    ]
    if splits > 1:
        merge = CombineConfig(head_dim, dtype)
        items = merge.threads // 32
        launches.append(
            Launch(
                merge,
                (-(-meta.max_rows * num_heads // items), meta.num_trees, 1),
                tuple(values[name] for name, _ in COMBINE_PARAMETERS),
            )
        )
    return launches


def feature_flags(kind: FeatureKind) -> dict[str, bool]:
    """What a variant is compiled by; sinks are in each."""
    return {
        "window": bool(kind.window),
        "soft_cap": bool(kind.soft_cap),
        "alibi": kind.alibi,
    }


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _number_kind(
    # [Hq], contiguous
    numbers: torch.Tensor | None,
) -> int:
    """Place in NUMBER_KINDS."""
    if numbers is None:
        return 0
    assert numbers.is_contiguous(), numbers.stride()
    return NUMBER_KINDS.index(str(numbers.dtype).removeprefix("torch."))


def _is_loadable(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Rows of the tensor can be read 16 bytes at a time."""
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
) -> TensorMapSpec:
    """Descriptor of a cache, fastest dimension first: element, slot, head, block."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    band = 64 if head_dim % 64 == 0 else 32
    strides = []
    for size, stride in ((block_size, 1), (num_kv_heads, 2), (num_blocks, 0)):
        # The stride of a dimension of one element may be anything; the descriptor's may not.
        strides.append(cache.stride(stride) if size > 1 else head_dim)
    return TensorMapSpec(
        cache.data_ptr(),
        str(cache.dtype).removeprefix("torch."),
        (head_dim, block_size, num_kv_heads, num_blocks),
        (1, *strides),
        (band, TILE_N, 1, 1),
        2 * band,
    )
