# SPDX-License-Identifier: Apache-2.0
"""Tree attention over a paged cache in Triton, for every CUDA device.

The query heads of one KV head are packed into rows, so a tile of K and V is read once for all of
them. Trees are split by their length, see `tree_parts_triton`; a second kernel merges the parts.
Only the tree's own columns use the ancestor words; the context has no mask.

Letters: T query rows of the step, M tree rows, R trees, Hq/Hkv heads, Dh head size, W 64-bit words
per mask row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .cuda_contract import TOKEN_SCALE_BYTES
from .cute.config import TILE_N, WAVES
from .cute.launch import GridSplit, split_grid
from .features import PLAIN, AttnFeatures, FeatureKind
from .lse_merge_triton import merge_parts
from .tree_attn_triton_kernel import _tree_attn_kernel
from .tree_parts_triton import MIN_TILES
from .tree_words_triton import fill_tree_words

if TYPE_CHECKING:
    from .metadata import TreeAttnMetadata

LOG2_E = 1.4426950408889634
# Longer windows are clamped to this, so that position + window fits 32 bits.
_LONGEST_WINDOW = 2**30

_MAX_BLOCK_M = 128
MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class TreeAttnConfig:
    """Tile sizes of one launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(
        cls,
        packed_rows: int,
        head_dim: int,
        itemsize: int,
        shared_memory: int,
        major: int = 9,
        dense: bool = False,
        kind: FeatureKind = PLAIN.kind,
    ) -> TreeAttnConfig:
        """Tiles for `packed_rows` rows x heads of the largest tree on a device of compute
        capability `major` whose blocks may take `shared_memory` bytes; with `dense` tails, for a
        layer of `kind`."""
        if itemsize == 4:
            return cls._of_float32(packed_rows, head_dim)
        if head_dim > 256:
            # Registers hold sixteen rows of outputs; more rows, or a single stage, spill.
            return cls(16, 16, 8, 2)
        # There are few sizes, because each is compiled.
        block_m = 16 if packed_rows <= 16 else 64 if packed_rows <= 64 else 128
        block_n = 64
        if head_dim > 128 or major < 9:
            # Tiles of wide heads on Ampere: more rows spill even with eight warps.
            block_m, block_n = min(block_m, 32 if head_dim > 128 and major < 9 else 64), 32
        if (dense or kind.token_scales) and major >= 10:
            block_m = min(block_m, 64)
        if (kind.alibi or kind.token_scales or (dense and kind.window)) and major < 9:
            # With slopes, token scales, or a window before a dense tail, more rows spill.
            block_m = min(block_m, 32)
        # K and V of a tile per stage, and the query once.
        padded = triton.next_power_of_2(head_dim)
        stage = 2 * block_n * padded * itemsize
        stages = (shared_memory - block_m * padded * itemsize - 8192) // stage
        # With fewer warps the accumulator spills: a warpgroup of Hopper holds 64 rows, four warps
        # of older devices only 32. On Blackwell it is in registers between two products.
        wide = block_m > (64 if major >= 9 else 32)
        # Addresses of a dense tail spill with four warps or three stages.
        if block_m == 64 and dense + kind.token_scales + (head_dim > 128) + (major >= 10) >= 2:
            wide = True
        if block_m == 32 or (kind.quantised_cache and head_dim > 128):
            wide = True
        deepest = 3 if not dense else 2 if head_dim <= 128 or block_m > 16 else 1
        if dense and kind.quantised_cache and major >= 10:
            deepest = 1
        return cls(block_m, block_n, 8 if wide else 4, int(max(1, min(deepest, stages))))

    @classmethod
    def _of_float32(cls, packed_rows: int, head_dim: int) -> TreeAttnConfig:
        """Tiles with products on lanes, because tensor cores would round float32 factors.

        A lane holds a head's numbers of every query row and key that it multiplies, so there are
        few of them. Heads wider than 128 still spill. Two stages take as much memory as one, at
        most 99,520 bytes, and a single one spills.
        """
        padded = max(16, triton.next_power_of_2(head_dim))
        if padded <= 32:
            block_m, block_n = 16 if packed_rows <= 16 else 64, 32
        elif padded == 64:
            block_m, block_n = (16, 32) if packed_rows <= 16 else (32, 16)
        else:
            block_m, block_n = 16, 16
        return cls(block_m, block_n, 4 if padded == 16 else 8, 2)


SMALL_TAIL = TreeAttnConfig(16, 64, 4, 1)
"""Tiles after another kernel's prefix. Programs are latency-bound there, so many
small ones are faster as long as all of them run at once."""


def config_for(
    device: torch.device,
    packed_rows: int,
    head_dim: int,
    itemsize: int,
    dense: bool = False,
    kind: FeatureKind = PLAIN.kind,
) -> TreeAttnConfig:
    """`TreeAttnConfig.choose` for a device."""
    _, shared_memory, major = _device_limits(device)
    return TreeAttnConfig.choose(packed_rows, head_dim, itemsize, shared_memory, major, dense, kind)


def resident_ctas_of(config: TreeAttnConfig, num_sms: int) -> int:
    """Returns about how many programs run at once: two per SM, or one with the largest tiles."""
    return num_sms * (1 if config.block_m == _MAX_BLOCK_M else 2)


def tail_config(
    config: TreeAttnConfig,
    device: torch.device,
    trees: int,
    num_kv_heads: int,
    packed_rows: int,
) -> TreeAttnConfig:
    """Returns the tiles for half-precision tails after another kernel's prefix; `config` is the
    choice for whole trees."""
    programs = trees * num_kv_heads * triton.cdiv(packed_rows, SMALL_TAIL.block_m)
    resident_ctas = resident_ctas_of(SMALL_TAIL, _device_limits(device)[0])
    return SMALL_TAIL if programs <= resident_ctas else config


def grid_split_of(
    trees: int, blocks: int, config: TreeAttnConfig, longest: int, num_sms: int, splits: int | None
) -> GridSplit:
    """Returns how trees of at most `longest` columns and `blocks` programs each are split over the
    grid. `splits` forces the parts of equally long trees."""
    tiles, resident_ctas = triton.cdiv(longest, TILE_N), resident_ctas_of(config, num_sms)
    split = split_grid(trees, blocks, tiles, resident_ctas, splits, MIN_TILES)
    several_may_be_cut = tiles >= 2 * MIN_TILES and WAVES[0] * resident_ctas > blocks
    if trees == 1 and splits is None and not split.parts and several_may_be_cut:
        # Warmup uses one tree and must compile the split variant that several trees may need.
        return GridSplit(1, 2, 1)
    return split


def most_workspace_bytes(device: torch.device) -> int:
    """Returns the most bytes that `tree_attn_triton` allocates besides its output.

    The parts of split trees are at most twice the programs of the finest waves.
    """
    rows = 2 * WAVES[0] * _device_limits(device)[0] * _MAX_BLOCK_M
    # Wider heads use tiles with fewer rows, and fewer elements in total.
    return rows * (256 * 4 + 4)


def tree_attn_triton(
    # [T, Hq, Dh]
    query: torch.Tensor,
    # [num_blocks, block_size, Hkv, Dh], any strides
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    # [T, Hq, Dh], written in place
    output: torch.Tensor,
    meta: TreeAttnMetadata,
    scale: float,
    # [M, Hkv, Dh]
    tail_key: torch.Tensor | None = None,
    tail_value: torch.Tensor | None = None,
    *,
    features: AttnFeatures = PLAIN,
    splits: int | None = None,
    # [T, Hq, Dh] and [Hq, T] float32
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Tree attention by `cuda_contract`. No host synchronisation, graph safe.

    Args:
        splits: forces the parts of equally long trees.
        prefix: attention over the context and its LSE, if another kernel has computed them without
            sinks. This kernel then reads only the tree's own columns. Rows without a context may
            be undefined. Not supported with a window, ALiBi or quantised caches.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert query.stride(2) == 1 and output.stride(2) == 1, (query.stride(), output.stride())
    if meta.num_trees == 0 or meta.max_rows == 0:
        return
    group = num_heads // num_kv_heads
    quantised = features.key_scales is not None
    assert quantised or query.dtype == key_cache.dtype, (query.dtype, key_cache.dtype)
    assert prefix is None or not (features.needs_positions or quantised)
    compute = output.dtype if quantised else query.dtype
    window = min(features.window, _LONGEST_WINDOW)
    num_sms = _device_limits(query.device)[0]
    dense = tail_key is not None
    itemsize = compute.itemsize
    config = config_for(
        query.device, meta.max_rows * group, head_dim, itemsize, dense, features.kind
    )
    if prefix is not None and itemsize == 2:
        packed_rows = meta.max_rows * group
        config = tail_config(config, query.device, meta.num_trees, num_kv_heads, packed_rows)
    row_tiles = triton.cdiv(meta.max_rows * group, config.block_m)
    attended = (min(meta.max_context, window) if window else meta.max_context) + meta.max_rows
    split = grid_split_of(
        meta.num_trees, row_tiles * num_kv_heads, config, attended, num_sms,
        splits if prefix is None else 1,
    )  # fmt: skip
    cut = split.parts > 0
    part_out, part_lse, part_record = query, query, meta.plan
    if cut:
        part_shape = (split.parts, meta.max_rows, num_heads)
        part_out = query.new_empty((*part_shape, head_dim), dtype=torch.float32)
        part_lse = query.new_empty(part_shape, dtype=torch.float32)
        part_record = query.new_empty((meta.num_trees, 2), dtype=torch.int32)
    full = meta.mask_kind == "full"
    words = meta.plan if full else tree_words(meta)
    tail_strides = (0, 0, 0, 0)
    if dense:
        assert tail_value is not None
        assert tail_key.stride(2) == 1 and tail_value.stride(2) == 1
        tail_strides = (*tail_key.stride()[:2], *tail_value.stride()[:2])
    context_out, context_lse = (query, query) if prefix is None else prefix
    prefix_strides = (*context_out.stride()[:2], context_lse.stride(0))
    assert prefix is None or (context_out.stride(2) == 1 and context_lse.stride(1) == 1)
    _tree_attn_kernel[(row_tiles, num_kv_heads, split.slots)](
        query,
        key_cache,
        value_cache,
        output,
        part_out,
        part_lse,
        part_record,
        meta.plan,
        words,
        meta.block_table,
        tail_key if dense else query,
        tail_value if dense else query,
        context_out,
        context_lse,
        scale * LOG2_E,
        meta.num_trees,
        split.forced_parts,
        resident_ctas_of(config, num_sms),
        split.slots - meta.num_trees,
        meta.max_rows,
        meta.plan.stride(0),
        words.stride(0),
        meta.block_table.stride(0),
        query.stride(0),
        query.stride(1),
        *output.stride()[:2],
        *key_cache.stride(),
        *value_cache.stride(),
        *tail_strides,
        *prefix_strides,
        features.sinks,
        features.alibi_slopes,
        features.query_scales,
        features.key_scales,
        features.value_scales,
        QUERY_SCALE_HEAD=_head_stride(features.query_scales),
        KEY_SCALE_HEAD=_head_stride(features.key_scales),
        VALUE_SCALE_HEAD=_head_stride(features.value_scales),
        **_token_scale_strides(key_cache, value_cache, features),
        WINDOW=window,
        SOFT_CAP=features.soft_cap,
        NEEDS_POSITIONS=features.needs_positions,
        COMPUTE=_TRITON_TYPES[compute],
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        PAGE=key_cache.shape[1],
        SPLIT=cut,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        DENSE_TAIL=dense,
        FULL_TAIL=full,
        HAS_PREFIX=prefix is not None,
        PRECISION="ieee" if compute == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if cut:
        merge_parts(part_out, part_lse, part_record, output, meta.plan)


_TRITON_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def _head_stride(scale: torch.Tensor | None) -> int:
    """Returns the stride between heads' scales; 0 if all heads share one."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(-1)


def _token_scale_strides(
    key_cache: torch.Tensor, value_cache: torch.Tensor, features: AttnFeatures
) -> dict[str, int]:
    """Returns strides of the scales per slot in elements, and the byte offset from keys to values;
    zeros without such scales."""
    if not features.token_scales:
        return {"SCALE_BLOCK": 0, "SCALE_TOKEN": 0, "VALUE_AT": 0}
    assert features.key_scales is not None
    strides = features.key_scales.stride()
    for cache in (key_cache, value_cache):
        assert cache.stride() == (*(TOKEN_SCALE_BYTES * s for s in strides), 1), cache.stride()
    value_at = value_cache.data_ptr() - key_cache.data_ptr()
    return {"SCALE_BLOCK": strides[0], "SCALE_TOKEN": strides[1], "VALUE_AT": value_at}


def tree_words(meta: TreeAttnMetadata) -> torch.Tensor:
    """Returns the ancestor words of `meta` [M, W]. Computes and stores them there if absent."""
    if meta.mask_words is None:
        width = max(1, triton.cdiv(meta.max_rows, 64))
        shape = (meta.num_rows, width)
        meta.mask_words = torch.zeros(shape, dtype=torch.int64, device=meta.plan.device)
        fill_tree_words(meta.plan, meta.parent_rows, meta.mask_words, meta.max_rows)
    return meta.mask_words


_LIMITS: dict[torch.device, tuple[int, int, int]] = {}


def _device_limits(device: torch.device) -> tuple[int, int, int]:
    """Returns the number of SMs, shared memory bytes per block and major compute capability."""
    if device not in _LIMITS:
        if device.type != "cuda":
            # The interpreter is slow per program, so pretend a device with one SM.
            _LIMITS[device] = (1, 227 * 1024, 9)
        else:
            properties = torch.cuda.get_device_properties(device)
            _LIMITS[device] = (
                properties.multi_processor_count,
                properties.shared_memory_per_block_optin,
                properties.major,
            )
    return _LIMITS[device]
