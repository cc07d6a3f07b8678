# SPDX-License-Identifier: Apache-2.0
"""Tree attention on CPU: vLLM's own backend, with tree rows taken over by our kernel."""

from __future__ import annotations

import functools

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    _get_attn_isa,
)

from vllm_specplug.kernels import CpuKvLayout, probe_cpu_layout, tree_attn
from vllm_specplug.verify.tree_rows import tree_rows_of


@functools.cache
def cpu_kv_layout(
    dtype: torch.dtype, block_size: int, head_dim: int
) -> tuple[str, CpuKvLayout]:
    """vLLM's instruction-set name for such a cache, and its layout as probed, not assumed."""
    isa = _get_attn_isa(dtype, block_size, head_dim)
    return isa, probe_cpu_layout(isa, dtype, block_size, head_dim)


def split_cpu_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, Hkv, block, 2 * Dh] -> key and value cache, each [blocks, Hkv, block, Dh]."""
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    key_cache, value_cache = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(
        2, dim=2
    )
    return key_cache, value_cache


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Registered over `CPU_ATTN` in workers that draft trees."""

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionBackendImpl]:
        return TreeCPUAttentionBackendImpl


class TreeCPUAttentionBackendImpl(CPUAttentionBackendImpl):
    """Stock attention for linear rows, the tree kernel for tree rows."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = tree_rows_of(attn_metadata)
        if rows is None or not rows.covers_batch:
            super().forward(
                layer,  # type: ignore[arg-type]
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if rows is not None:
            key_cache, value_cache = split_cpu_cache(kv_cache)
            _, layout = cpu_kv_layout(kv_cache.dtype, kv_cache.shape[2], self.head_size)
            tree_attn(
                query, key_cache, value_cache, output, rows.metadata, self.scale, layout
            )
        return output
