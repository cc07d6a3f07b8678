# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend over vLLM's CPU cache, its kernels in Triton's interpreter.

Far too slow to serve with. It runs the logic that serves on CUDA where there is no GPU:
`TRITON_INTERPRET=1` and option `tree_kernel` "triton" on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_specplug.vllm_attention.cpu import cpu_kv_layout
from vllm_specplug.vllm_attention.tree_rows import CacheViews
from vllm_specplug.vllm_v1.cuda_trees import CudaTreeBackend


def transposed_key_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's CPU cache of kind "vec" [num_blocks, Hkv, block_size, 2 * Dh] as key_cache and
    value_cache [num_blocks, block_size, Hkv, Dh]: keys lie [Dh, block_size] in a block and head."""
    num_blocks, num_heads, block_size, width = kv_cache.shape
    halves = kv_cache.view(num_blocks, num_heads, 2, -1)
    key = halves[:, :, 0].unflatten(-1, (width // 2, block_size)).permute(0, 3, 1, 2)
    value = halves[:, :, 1].unflatten(-1, (block_size, width // 2)).transpose(1, 2)
    return key, value


class InterpretedTreeBackend(CudaTreeBackend):
    """`CudaTreeBackend` on a CPU."""

    reads_fp8 = False

    def views_of(self, kv_cache: torch.Tensor) -> CacheViews:
        layout = cpu_kv_layout(kv_cache)
        if layout.kind != "vec":
            raise ValueError(
                f"tree_kernel='triton' on a CPU reads cache layout 'vec', and this one is "
                f"{layout.kind!r} (dtype {layout.dtype}); use dtype float32, or another kernel"
            )
        return transposed_key_views

    def capability(self) -> tuple[int, int]:
        return (9, 0)

    def cache_writer(self) -> Callable[..., None]:
        from vllm import _custom_ops as ops

        def write(
            key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            layout = cpu_kv_layout(kv_cache)
            keys, values = layout.views(kv_cache)
            ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, layout.isa)

        return write
