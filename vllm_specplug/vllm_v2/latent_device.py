# SPDX-License-Identifier: Apache-2.0
"""Verification of trees over the latent cache of a target with MLA, on CUDA.

It is a separate module because it imports classes of vLLM that other targets do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_specplug.kernels.cuda_dispatch import ChosenKernel
from vllm_specplug.tree.step_trees import StepTrees
from vllm_specplug.vllm_attention.latent_gpu import latent_metadata
from vllm_specplug.vllm_attention.tree_rows import DeviceTreeRows, attach_tree_rows
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_worker.memory.cache_groups import CacheGroup

logger = init_logger("vllm.specplug.cuda")


def _halves(
    # [num_blocks, block_size, D]
    cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the two halves of a latent cache's rows, [num_blocks, block_size, 1, D / 2] each, as
    compaction moves keys and values."""
    first, second = cache.unsqueeze(2).chunk(2, dim=-1)
    return first, second


class LatentDeviceBackend(CudaTreeBackend):
    """Trees over a latent cache on CUDA.

    The rows of all requests that vLLM decodes are in the plan: a request without drafts is a single
    row, and a short piece of a prompt is a chain.
    """

    views = staticmethod(_halves)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from vllm_specplug.kernels.latent_attn_triton import latent_attn_triton

        # Before the caches are bound: while vLLM measures graphs, its dummy requests may have
        # several rows, which its own kernels cannot decode.
        self.kernel = ChosenKernel("triton", latent_attn_triton, "the only one for latent rows")

    def bind(self, groups: list[CacheGroup]) -> None:
        from vllm_specplug.kernels.kv_compact_triton import LayerCaches
        from vllm_specplug.kernels.latent_attn_triton import self_test

        self.groups = [
            (group.index, LayerCaches.of([_halves(c) for c in group.own_caches]))
            for group in groups
        ]
        first = groups[0]
        self.cache = next(iter(first.caches.values()))
        self.num_heads, self.latent_size = first.num_heads or self.num_heads, first.latent_size
        self.block_size, self.dtype = self.cache.shape[1], self.cache.dtype
        reason = self.kernel.reason
        if self.device.type == "cuda":
            error = self_test(self.cache, self.latent_size, self.num_heads)
            reason += f"; differs from the reference by {error:.1e}"
        logger.info("Tree attention: %s kernel (%s)", self.kernel.name, reason)

    def attach(
        self,
        attn_metadata: dict[str, Any],
        input_batch: Any,
        trees: StepTrees | None,
        block_tables: Sequence[torch.Tensor],
    ) -> None:
        rows = None
        for metadata in latent_metadata(attn_metadata):
            if trees is not None:
                # vLLM's kernels for prompts would attend a tree as a chain.
                drafts = np.diff(input_batch.cu_num_logits_np)[metadata.num_decodes :] > 1
                assert not drafts.any(), "a request with drafts is not decoded"
            # vLLM's kernel decodes single rows.
            if metadata.num_decode_tokens > metadata.num_decodes:
                rows = rows or self._decoded_rows(metadata, input_batch, trees, block_tables[0])
                attach_tree_rows(metadata, rows)

    def _decoded_rows(
        self,
        metadata: Any,
        input_batch: Any,
        trees: StepTrees | None,
        block_table: torch.Tensor,
    ) -> DeviceTreeRows:
        """Returns the rows of the requests that vLLM decodes, which are the first of the batch."""
        count, num_rows = metadata.num_decodes, metadata.num_decode_tokens
        counts = np.diff(input_batch.query_start_loc_np[: count + 1])
        made = self.graph_trees.fill(
            trees,
            input_batch.query_start_loc[: count + 1],
            input_batch.seq_lens[:count],
            block_table,
            num_rows,
            int(counts.max()),
        )
        if trees is not None:
            made.max_context = trees.rows.max_context
        self.fill_words(made)
        return DeviceTreeRows(made, self.kernel.run, self.views, metadata.num_prefills == 0)

    def run_every_variant(self, synchronize: Callable[[], None]) -> None:
        """See `CudaKernels.run_every_variant`."""
        super().run_every_variant(synchronize)
        from vllm_specplug.kernels.finite_values_triton import store_isolated_triton
        from vllm_specplug.kernels.latent_attn_triton import latent_attn_triton

        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        blocks = torch.zeros(1, -(-self.limits.context // self.block_size), **ints)
        no_slot = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        cache, size = self.cache, self.latent_size
        for rows in {1, self.limits.tree_rows}:
            query = cache.new_zeros(rows, self.num_heads, cache.shape[2])
            latent, rotary = query[..., :size].contiguous(), query[..., size:]
            ends = torch.tensor([0, rows], **ints)
            # A context bound of 0 gives an unsplit context, the limit a split one.
            for context in (0, self.limits.context):
                made = self.graph_trees.fill(None, ends, ends[1:], blocks, rows, rows)
                made.max_context = context
                self.fill_words(made)
                latent_attn_triton(latent, rotary, cache, torch.empty_like(latent), made, 1.0)
                # A failing variant must raise here.
                synchronize()
            pages = cache.unsqueeze(2)
            store_isolated_triton(
                rotary[:1, :1], latent[:1, :1], pages[..., size:], pages[..., :size], no_slot
            )
