# SPDX-License-Identifier: Apache-2.0
"""Tree attention on CPU: vLLM's own backend, with tree rows taken over by the tree kernel."""

from __future__ import annotations

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    _get_attn_isa,
)

from vllm_specplug.kernels import CpuKvLayout, probe_cpu_layout
from vllm_specplug.vllm_attention.tree_rows import TreeAttentionMixin


def cpu_kv_layout(kv_cache: torch.Tensor) -> CpuKvLayout:
    """The layout of a layer's cache [blocks, Hkv, block, 2 * Dh], probed, not assumed."""
    block_size, head_size = kv_cache.shape[2], kv_cache.shape[3] // 2
    isa = _get_attn_isa(kv_cache.dtype, block_size, head_size)
    return probe_cpu_layout(isa, kv_cache.dtype, block_size, head_size)


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Registered over `CPU_ATTN` in workers that draft trees."""

    takes_tree_rows = True

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionBackendImpl]:
        return TreeCPUAttentionBackendImpl


class TreeCPUAttentionBackendImpl(TreeAttentionMixin, CPUAttentionBackendImpl):
    """Stock attention for linear rows, the tree kernel for tree rows."""

    serves = frozenset({"sliding_window", "logits_soft_cap", "sinks", "alibi_slopes"})
