# SPDX-License-Identifier: Apache-2.0
"""Attention of drafted rows over vLLM's GPU pages, and the drafter's own pages there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.kernels import AttnFeatures, TreeAttnMetadata, single_row_metadata
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel, KernelShape
from vllm_specplug.kernels.features import PLAIN
from vllm_specplug.kernels.finite_values import make_finite
from vllm_specplug.vllm_worker.cuda_kernels import CudaKernels
from vllm_specplug.vllm_worker.memory.draft_cache import BlockTable, DraftKVLayer

# Rows of one call of `context_attention`. Each row is a tree, and a kernel counts the trees of a
# call in half an integer.
_MAX_CONTEXT_ROWS = 4096


def table_rows(requests: DeviceRequests) -> torch.Tensor:
    """Returns int32 [R]: each request's row of the batch's block table."""
    if requests.rows is not None:
        return requests.rows
    return torch.arange(len(requests), dtype=torch.int32, device=requests.anchors.device)


class CudaDraftRows:
    """Attention of drafted rows over caches on the device, which do not hold the rows' own keys and
    values.

    Args:
        kv_caches: [num_blocks, Hkv, block_size, 2 * Dh] of each layer.
    """

    def __init__(
        self,
        backend: CudaKernels,
        kv_caches: list[torch.Tensor],
        block_table: BlockTable,
        scale: float,
    ) -> None:
        self.backend = backend
        self.block_table = block_table
        self.scale = scale
        self.kv_caches = kv_caches
        views = backend.views_of(kv_caches[0])
        self.views = [views(cache) for cache in kv_caches]
        self.features = [PLAIN] * len(kv_caches)
        self.kernel: ChosenKernel | None = None

    def attention_of(
        self, metadata: TreeAttnMetadata
    ) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns the attention of rows whose own keys and values are not in the cache."""
        # A draft may skip requests of the batch. Without starts, kernels need no variant for gaps.
        metadata.query_starts = None
        needs_words = metadata.mask_kind == "tree"

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            nonlocal needs_words
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
            kernel = self.kernel_for(query, key)
            if needs_words:
                # Here, because the kernel may differ from the target's.
                self.backend.fill_words(metadata, kernel)
                needs_words = False
            features = self.features[layer]
            more = {} if features.is_plain else {"features": features}
            kernel.run(query, *self.views[layer], output, metadata, self.scale, key, value, **more)
            return output

        return attend

    def metadata_of(
        self,
        requests: DeviceRequests,
        # [R]
        context_lens: torch.Tensor,
        # [R, rows] int32
        parent_rows: torch.Tensor,
        # [R] int32 of the block table; None for those of the batch
        tables: torch.Tensor | None = None,
    ) -> TreeAttnMetadata:
        """Returns the metadata of equally many rows per request, and of none for requests without a
        draft."""
        device, (count, rows) = self.backend.device, parent_rows.shape
        starts = torch.arange(0, count * rows, rows, dtype=torch.int32, device=device)
        counts = torch.where(requests.budgets > 0, torch.full_like(starts, rows), 0)
        if tables is None:
            tables = table_rows(requests)
        words = (count * rows, -(-rows // 64))
        return TreeAttnMetadata(
            torch.stack([tables, starts, counts, context_lens.to(torch.int32), starts]),
            self.block_table(),
            max_rows=rows,
            max_context=requests.max_context,
            mask_words=torch.empty(words, dtype=torch.int64, device=device),
            parent_rows=parent_rows.flatten(),
        )

    def kernel_for(self, query: torch.Tensor, key: torch.Tensor) -> ChosenKernel:
        """Returns the kernel for the draft head, whose head counts may differ from the target's."""
        if self.kernel is None:
            block_size = self.views[0][0].shape[1]
            shape = (query.shape[1], key.shape[1], query.shape[2], block_size)
            kinds = list(dict.fromkeys(features.kind for features in self.features))
            shape_of_kinds = KernelShape.of(shape, query.dtype, kinds)
            self.kernel = self.backend.choose(shape_of_kinds, for_drafts=True)
        return self.kernel


class CudaDraftCache(CudaDraftRows):
    """`drafting.caches.DraftCache` over the pages of `DraftKVLayer`s, on the device."""

    def __init__(
        self,
        backend: CudaKernels,
        layers: list[DraftKVLayer],
        block_table: BlockTable,
        scale: float,
    ) -> None:
        super().__init__(backend, [layer.kv_cache for layer in layers], block_table, scale)
        self.features = [AttnFeatures(window=layer.spec.window or 0) for layer in layers]
        self.write_layer = backend.cache_writer()

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, first_layer: int = 0
    ) -> None:
        """Stores keys and values [num_layers, M, Hkv, Dh] of committed tokens at `slots` [M]."""
        make_finite(keys, values)
        caches = self.kv_caches[first_layer : first_layer + len(keys)]
        for kv_cache, key, value in zip(caches, keys, values, strict=True):
            self.write_layer(key, value, kv_cache, slots)

    def context_attention(
        self, table_rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns the attention of committed tokens over the tokens up to them."""
        table = self.block_table()
        longest = table.shape[1] * self.views[0][0].shape[1]
        counts = (slots >= 0).int()
        columns = (x.split(_MAX_CONTEXT_ROWS) for x in (table_rows, positions, counts))
        pieces = [
            self.attention_of(single_row_metadata(*rows, table, longest))
            for rows in zip(*columns, strict=True)
        ]

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            parts = zip(*(x.split(_MAX_CONTEXT_ROWS) for x in (query, key, value)), strict=True)
            mixed = [piece(layer, *rows) for piece, rows in zip(pieces, parts, strict=True)]
            return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

        return attend

    def block_attention(
        self, requests: DeviceRequests, rows: int, causal: bool | Sequence[bool]
    ) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns the attention of `rows` block rows per request over its context and the block."""
        masks = [causal] * len(self.views) if isinstance(causal, bool) else causal
        chain = torch.arange(-1, rows - 1, dtype=torch.int32, device=self.backend.device)
        parents = chain.repeat(len(requests), 1)
        metadata = self.metadata_of(requests, requests.context_lens, parents)
        attend = {}
        for mask in set(masks):
            own = copy(metadata)
            own.mask_kind = "tree" if mask else "full"
            attend[mask] = self.attention_of(own)
        return lambda layer, query, key, value: attend[masks[layer]](layer, query, key, value)

    def tree_attention(
        self,
        requests: DeviceRequests,
        # [R]
        context_lens: torch.Tensor,
        # [R, rows] int32
        parents: torch.Tensor,
    ) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns the attention of tree rows over their context and branch; see the protocol."""
        return self.attention_of(self.metadata_of(requests, context_lens, parents))
