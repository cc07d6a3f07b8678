# SPDX-License-Identifier: Apache-2.0
"""Tree attention on CPU: vLLM's own backend, with tree rows taken over by our kernel."""

from __future__ import annotations

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    _get_attn_isa,
)

from vllm_specplug.kernels import CpuKvLayout, probe_cpu_layout, tree_attn
from vllm_specplug.verify.tree_rows import tree_rows_of


def cpu_kv_layout(kv_cache: torch.Tensor) -> CpuKvLayout:
    """The layout of a layer's cache [blocks, Hkv, block, 2 * Dh], probed, not assumed."""
    block_size, head_size = kv_cache.shape[2], kv_cache.shape[3] // 2
    isa = _get_attn_isa(kv_cache.dtype, block_size, head_size)
    return probe_cpu_layout(isa, kv_cache.dtype, block_size, head_size)


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
            key_cache, value_cache = rows.layout.views(kv_cache)
            tree_attn(query, key_cache, value_cache, output, rows.metadata, self.scale, rows.layout)
        return output
