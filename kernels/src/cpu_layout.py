# SPDX-License-Identifier: Apache-2.0
"""The layout of K and V in a block of one head in vLLM's CPU KV cache.

The layout depends on vLLM's instruction set and is not a public interface. So it is measured:
vLLM's own op writes known values, which are then located.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Kinds the kernels read directly, with their number in csrc/cpu/tree_attn.h. Offsets of (token t,
# dim d) in elements:
#   vec    K t + d * block                              V d + t * head
#   vnni   K of 16-token panels, pairs of dims inside   V of 16-dim panels, pairs of tokens inside
#   table  anything else, by index table (slower)
KINDS = {"vec": 0, "vnni": 1, "table": 2}

# Integers up to these are exact in caches of 16 and 32 bits, and in caches of 8 bits.
_DIGIT, _SMALL_DIGIT = 128, 8

# vLLM's names of 8-bit dtypes, whose caches it allocates as uint8.
FP8_CACHES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, eq=False)
class CpuKvLayout:
    """The measured layout of a cache [num_blocks, Hkv, block_size, 2 * head_size]."""

    kind: str
    isa: str
    dtype: torch.dtype
    block_size: int
    head_size: int
    # [2, block_size, head_size] int32: element offsets of K and V from the start of the K or V
    # half of one (block, head)
    tables: torch.Tensor
    kind_id: int

    def views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns key_cache and value_cache [num_blocks, Hkv, block_size, head_size] of a layer's
        cache.

        The last two dimensions only span the interior, whose order is the layout's. The views are
        valid as long as the cache, so make them once per layer.
        """
        num_blocks, num_heads, block_size, _ = kv_cache.shape
        if kv_cache.dtype == torch.uint8:
            kv_cache = kv_cache.view(self.dtype)
        key, value = kv_cache.view(num_blocks, num_heads, 2 * block_size, -1).chunk(2, dim=2)
        return key, value

    def gather(
        self,
        # [num_blocks, Hkv, block_size, head_size] views as made by `views`
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        # [L] int64
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of the given slots, each [L, Hkv, head_size]."""
        block = (slots // self.block_size)[:, None, None]
        index = self.tables[:, slots % self.block_size, None].long()  # [2, L, 1, Dh]
        head = torch.arange(key_cache.shape[1])[:, None]

        def read(cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            # Reads no whole blocks. Torch cannot index 8-bit floats.
            is_byte = self.dtype.itemsize == 1
            words = (cache.view(torch.uint8) if is_byte else cache).flatten(2)
            found = words[block, head, index]
            return found.view(self.dtype).float() if is_byte else found

        return read(key_cache, index[0]), read(value_cache, index[1])


def standard_tables(kind: str, block_size: int, head_size: int) -> torch.Tensor:
    """Returns the offset table int32 [2, block_size, head_size] of kind "vec" or "vnni"."""
    t = torch.arange(block_size).view(-1, 1)
    d = torch.arange(head_size).view(1, -1)
    if kind == "vec":
        key = t + d * block_size
        value = d + t * head_size
    else:
        key = t // 16 * (16 * head_size) + d // 2 * 32 + t % 16 * 2 + d % 2
        value = d // 16 * (16 * block_size) + t // 2 * 32 + d % 16 * 2 + t % 2
    return torch.stack([key, value]).to(torch.int32)


def _vllm_write(
    key, value, key_cache, value_cache, slots, isa: str, key_dtype: torch.dtype
) -> None:
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        raise RuntimeError(
            "vLLM's CPU kernels are not loaded: torch.ops._C.cpu_attn_reshape_and_cache is "
            "missing. Call vllm.platforms.current_platform.import_kernels() first."
        )
    kind = "auto"
    if key_cache.dtype.itemsize == 1:
        kind = next(name for name, dtype in FP8_CACHES.items() if dtype == key_cache.dtype)
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    key, value = key.to(key_dtype), value.to(key_dtype)
    torch.ops._C.cpu_attn_reshape_and_cache(
        key, value, key_cache, value_cache, slots, isa, 1.0, 1.0, kind
    )


def measure_layout(
    write: Callable[..., None], dtype: torch.dtype, block_size: int, head_size: int
) -> torch.Tensor:
    """Finds where `write` puts K and V.

    Args:
        write: `(key, value, key_cache, value_cache, slots)` like vLLM's reshape-and-cache, with
            key and value [T, Hkv, head_size] and slots int64 [T].

    Returns:
        int32 [2, block_size, head_size] element offsets inside the K and the V half of a block.

    Raises:
        RuntimeError: if the values do not come back as one value per (token, dim) in the right
            block and head.
    """
    num_blocks, num_heads, block = 3, 2, 1
    slots = torch.arange(block_size) + block * block_size
    token = torch.arange(block_size).view(-1, 1, 1).expand(-1, num_heads, head_size)
    head = torch.arange(num_heads).view(1, -1, 1).expand(block_size, -1, head_size)
    dim = torch.arange(head_size).view(1, 1, -1).expand(block_size, num_heads, -1)
    is_value = num_heads  # added to V's head number, to distinguish V from K
    digit = _SMALL_DIGIT if dtype.itemsize == 1 else _DIGIT

    def written(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Returns the K and V halves of the written block, [2, Hkv, block_size * head_size]."""
        shape = num_blocks, num_heads, 2 * block_size, head_size
        cache = torch.full(shape, -1.0).to(dtype)
        key_cache, value_cache = cache.chunk(2, dim=2)
        write(
            key.to(dtype).contiguous(), value.to(dtype).contiguous(), key_cache, value_cache, slots
        )
        cache = cache.float()
        others = torch.cat([cache[:block], cache[block + 1 :]])
        if not bool((others == -1).all()):
            raise RuntimeError("vLLM's cache op wrote outside the block of its slots")
        return cache[block].round().long().view(num_heads, 2, -1).transpose(0, 1)

    def measured(quantity: torch.Tensor, limit: int) -> torch.Tensor:
        found, place = 0, 1
        while place < limit:
            found = found + place * written(*[quantity // place % digit] * 2)
            place *= digit
        return found

    heads = written(head, head + is_value)
    expected = torch.arange(num_heads).view(1, -1, 1) + torch.tensor([0, is_value]).view(2, 1, 1)
    tokens, dims = measured(token, block_size), measured(dim, head_size)
    in_range = (tokens >= 0) & (tokens < block_size) & (dims >= 0) & (dims < head_size)
    per_head_equal = (tokens == tokens[:, :1]) & (dims == dims[:, :1])
    if not bool(((heads == expected) & in_range & per_head_equal).all()):
        raise RuntimeError(
            "vLLM's CPU KV cache has a layout this plugin cannot read: K, V or heads are not kept "
            f"apart within a block (dtype {dtype}, block size {block_size}, head size {head_size})"
        )
    flat = tokens[:, 0] * head_size + dims[:, 0]  # [2, block_size * head_size]
    positions = torch.arange(block_size * head_size).expand(2, -1)
    if not bool((flat.sort(dim=1).values == positions).all()):
        raise RuntimeError(
            "vLLM's CPU KV cache has a layout this plugin cannot read: it is not a permutation of "
            f"(token, dim) (dtype {dtype}, block size {block_size}, head size {head_size})"
        )
    tables = torch.empty_like(flat)
    tables.scatter_(1, flat, positions)
    return tables.view(2, block_size, head_size).to(torch.int32)


@functools.cache
def probe_cpu_layout(
    isa: str,
    dtype: torch.dtype,
    block_size: int,
    head_size: int,
    key_dtype: torch.dtype | None = None,
) -> CpuKvLayout:
    """Measures the layout of vLLM for (isa, dtype, block_size, head_size).

    Args:
        dtype: of the numbers in the cache.
        key_dtype: of the keys that are written; None where they are of `dtype`.

    Raises:
        RuntimeError: if vLLM's kernels are not loaded or the layout is not a permutation.
    """

    def write(*args) -> None:
        _vllm_write(*args, isa, key_dtype or dtype)

    tables = measure_layout(write, dtype, block_size, head_size)
    return make_layout(tables, isa, dtype)


def make_layout(
    # [2, block_size, head_size] int32
    tables: torch.Tensor,
    isa: str,
    dtype: torch.dtype,
) -> CpuKvLayout:
    """Returns the kind of a measured layout."""
    _, block_size, head_size = tables.shape
    kind = "table"
    if torch.equal(tables, standard_tables("vec", block_size, head_size)):
        kind = "vec"
    elif (
        dtype == torch.bfloat16
        and block_size % 16 == 0
        and head_size % 16 == 0
        and torch.equal(tables, standard_tables("vnni", block_size, head_size))
    ):
        kind = "vnni"
    return CpuKvLayout(kind, isa, dtype, block_size, head_size, tables.contiguous(), KINDS[kind])
