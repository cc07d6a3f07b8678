# SPDX-License-Identifier: Apache-2.0
"""Draft layers' context keys and values, kept in vLLM's own pages.

Each draft layer registers a cache of its own beside the target's layers, so it shares their
blocks: prefix caching, preemption and memory accounting work without extra code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from vllm_specplug.drafting.caches import BlockAttention, DraftCacheSpec
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels import (
    AttnFeatures,
    CpuKvLayout,
    TreeAttnMetadata,
    block_metadata,
    single_row_metadata,
    tree_attn,
    tree_metadata,
)
from vllm_specplug.kernels.features import PLAIN
from vllm_specplug.kernels.finite_values import make_finite
from vllm_specplug.vllm_attention.cpu import (
    DraftCPUAttentionBackend,
    TreeCPUAttentionBackend,
    cpu_kv_layout,
)

# Returns the current batch's block table, int32 [>= B, max_blocks].
BlockTable = Callable[[], torch.Tensor]


class DraftKVLayer(AttentionLayerBase):
    """A cache-only layer: vLLM allocates its pages, only the drafter reads and writes them.

    Seam: draft_kv_layer.
    """

    def __init__(self, vllm_config: Any, name: str, spec: DraftCacheSpec) -> None:
        context = vllm_config.compilation_config.static_forward_context
        if name in context:
            raise ValueError(f"duplicate attention layer name: {name}")
        context[name] = self
        model_config = vllm_config.model_config
        self.spec = spec
        self.dtype = model_config.dtype
        # Layers of one KV cache spec and head count share a metadata builder, so a draft layer of
        # the target's shape joins the target's. Any other gets a builder whose schedule nothing
        # reads: it divides by query heads per KV head, and 0 of them would end the process.
        parallel = vllm_config.parallel_config
        shape = (model_config.get_num_kv_heads(parallel), model_config.get_head_size())
        self.num_heads = (
            model_config.get_num_attention_heads(parallel)
            if shape == (spec.num_kv_heads, spec.head_dim)
            else spec.num_kv_heads
        )
        self.kv_cache = torch.empty(0)
        self.attn_backend: type[AttentionBackend] = get_attn_backend(
            head_size=spec.head_dim,
            dtype=self.dtype,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
        )
        if model_config.use_mla and issubclass(self.attn_backend, TreeCPUAttentionBackend):
            self.attn_backend = DraftCPUAttentionBackend

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.spec.num_kv_heads,
            head_size=self.spec.head_dim,
            dtype=self.dtype,
        )


class PagedDraftCache:
    """`drafting.caches.HostCache` over the pages of `DraftKVLayer`s, on CPU."""

    def __init__(self, layers: list[DraftKVLayer], block_table: BlockTable, scale: float) -> None:
        self.block_table = block_table
        self.scale = scale
        # A KV connector fills pages with the context of tokens that this engine never computed.
        self.knows_slots = not has_kv_transfer_group()
        self.layout = cpu_kv_layout(layers[0].kv_cache)
        self.features = [AttnFeatures(window=layer.spec.window or 0) for layer in layers]
        self.caches = [self.layout.views(layer.kv_cache) for layer in layers]

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, first_layer: int = 0
    ) -> None:
        """Stores keys and values [num_layers, M, Hkv, Dh] of committed tokens at `slots` [M]."""
        from vllm import _custom_ops as ops

        make_finite(keys, values)
        caches = self.caches[first_layer : first_layer + len(keys)]
        for (key_cache, value_cache), key, value in zip(caches, keys, values, strict=True):
            ops.cpu_attn_reshape_and_cache(
                key, value, key_cache, value_cache, slots, self.layout.isa
            )

    def slots(self, req_index: int, num_tokens: int) -> np.ndarray:
        """Returns the slots int64 [num_tokens] of a request's first tokens."""
        size = self.layout.block_size
        blocks = self.block_table()[req_index, : -(-num_tokens // size)].numpy().astype(np.int64)
        return (blocks[:, None] * size + np.arange(size)).reshape(-1)[:num_tokens]

    def block_attention(
        self, requests: DraftRequests, rows: int, causal: bool | Sequence[bool]
    ) -> BlockAttention:
        """Returns the attention of `rows` block rows per request over its context and the block."""
        block_table = self.block_table()
        masks = [causal] * len(self.caches) if isinstance(causal, bool) else causal
        attend = {
            mask: self._attention(
                block_metadata(
                    req_indices=requests.req_indices,
                    context_lens=requests.context_lens,
                    rows=rows,
                    causal=mask,
                    block_table=block_table,
                )
            )
            for mask in set(masks)
        }
        return lambda layer, query, key, value: attend[masks[layer]](layer, query, key, value)

    def tree_attention(
        self, requests: DraftRequests, context_lens: torch.Tensor, parents: list[np.ndarray]
    ) -> BlockAttention:
        """Returns the attention of tree rows over their context and branch; see the protocol."""
        starts = np.cumsum([0, *(len(p) + 1 for p in parents)])[:-1]
        metadata = tree_metadata(
            requests.req_indices,
            starts.tolist(),
            context_lens.tolist(),
            parents,
            self.block_table(),
        )
        return self._attention(metadata)

    def context_attention(
        self, table_rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> BlockAttention:
        """Returns the attention of committed tokens over the tokens up to them."""
        metadata = single_row_metadata(
            table_rows, positions, (slots >= 0).int(), self.block_table(), int(positions.max())
        )
        return self._attention(metadata)

    def _attention(self, metadata: TreeAttnMetadata) -> BlockAttention:
        """Returns the attention of rows whose own keys and values are a dense tail."""
        return lambda layer, query, key, value: attend_with_tail(
            query, key, value, self.caches[layer], metadata, self.scale, self.layout,
            self.features[layer],
        )  # fmt: skip


def attend_with_tail(
    # [M, Hq, Dh]
    query: torch.Tensor,
    # [M, Hkv, Dh] of the rows themselves, which the cache does not hold
    key: torch.Tensor,
    value: torch.Tensor,
    # keys and values of a layer in pages
    views: tuple[torch.Tensor, torch.Tensor],
    metadata: TreeAttnMetadata,
    scale: float,
    layout: CpuKvLayout,
    features: AttnFeatures = PLAIN,
) -> torch.Tensor:
    """Returns the attention [M, Hq, Dh] of tree rows over their context in pages and their tree."""
    output = torch.empty_like(query)
    tree_attn(query, *views, output, metadata, scale, layout, key, value, features=features)
    return output
