# SPDX-License-Identifier: Apache-2.0
"""`window_cache` on a device: the host never reads the device to know what a window holds.

Windows are rings as on a CPU. The host knows the maximum tokens that a request can have got since
its last draft. It stores that many tokens before the anchor, some of them for a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from vllm_specplug.drafting.caches import (
    RowAttention,
    TargetCacheSpec,
    WindowSpec,
    WindowTokens,
)
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import device_tensor
from vllm_specplug.kernels import AttnFeatures
from vllm_specplug.kernels.finite_values import make_finite
from vllm_specplug.vllm_worker.cuda_kernels import CudaKernels
from vllm_specplug.vllm_worker.memory.device_draft_cache import CudaDraftRows, table_rows
from vllm_specplug.vllm_worker.memory.draft_cache import BlockTable
from vllm_specplug.vllm_worker.memory.window_cache import WINDOW_PAGE, Rings


class DeviceWindowCache(CudaDraftRows, Rings):
    """`drafting.caches.DraftWindow` in its own memory: one ring per running request."""

    def __init__(
        self, backend: CudaKernels, spec: WindowSpec, num_requests: int, dtype: torch.dtype
    ) -> None:
        Rings.__init__(self, spec, num_requests)
        device = backend.device
        blocks = num_requests * self.blocks_per_request
        pages = torch.zeros(
            (blocks, WINDOW_PAGE, spec.num_kv_heads, 2 * spec.head_dim), dtype=dtype, device=device
        )
        # [num_requests, blocks]: the pages of each ring
        table = torch.arange(len(pages), dtype=torch.int32, device=device).view(num_requests, -1)
        CudaDraftRows.__init__(
            self, backend, [pages.transpose(1, 2)], lambda: table, spec.head_dim**-0.5
        )
        self.write_layer = backend.cache_writer()
        # [R] int32 of the last requests
        self._tables = table[:0, 0]

    def missing(self, requests: DeviceRequests) -> WindowTokens:
        """See the protocol."""
        history, size = requests.history, self.spec.size
        assert history is not None
        most = min(size, requests.max_context)
        rings, counts = [], []
        for req_id, length, is_drafted in zip(
            history.req_ids, history.len_upper_bounds, history.is_drafted, strict=True
        ):
            if not is_drafted:
                rings.append(0)
                counts.append(0)
                continue
            ring = self.region_of(req_id)
            rings.append(ring.index)
            # A request with fewer tokens than before is another request.
            new = length - ring.stored
            counts.append(min(most, new) if new >= 0 else most)
            ring.stored = length
        count = sum(counts)
        owners = np.repeat(np.arange(len(counts)), counts)
        # Distance of each token before its anchor, from 1.
        back = 1 + np.arange(count) - np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        # One copy.
        joined = device_tensor(np.concatenate([rings, owners, back]), self.backend.device)
        tables, owner, behind = joined.split([len(rings), count, count])
        self._tables = tables.to(torch.int32)
        positions = requests.context_lens[owner].long() - behind
        exists = positions >= 0
        positions = positions.clamp_min(0)
        slots = tables[owner] * self.stride + positions % size
        return WindowTokens(
            history.token_ids[history.lines[owner], positions].long(),
            positions,
            torch.where(exists, slots, -1),
        )

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [M, Hkv, Dh] at `slots` [M]; nothing at -1."""
        make_finite(keys, values)
        self.write_layer(keys, values, self.kv_caches[0], slots)

    def tree_attention(
        self,
        requests: DeviceRequests,
        # [R]
        context_lens: torch.Tensor,
        # [R, rows] int32
        parents: torch.Tensor,
    ) -> RowAttention:
        """Returns the attention over the window and a branch; see the protocol."""
        held = context_lens.clamp_max(self.spec.size)
        metadata = self.metadata_of(requests, held, parents, self._tables)
        metadata.max_context = min(metadata.max_context, self.spec.size)
        return partial(self.attention_of(metadata), 0)


class PagedDeviceTargetCache(CudaDraftRows):
    """`drafting.caches.TargetCache` over one attention layer of the target.

    Tree kernels let every row attend itself. Here they read the context except its last token, and
    each row gets the keys and values of that token as its own. So a row attends only the context.
    """

    def __init__(
        self,
        backend: CudaKernels,
        kv_cache: torch.Tensor,
        block_table: BlockTable,
        spec: TargetCacheSpec,
    ) -> None:
        super().__init__(backend, [kv_cache], block_table, spec.scale)
        self.features = [AttnFeatures(window=spec.window or 0)]

    def level_attention(
        self,
        requests: DeviceRequests,
        # [R]
        context_lens: torch.Tensor,
        owners: torch.Tensor,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the attention over the first `context_lens` positions of requests; see the
        protocol."""
        device = self.backend.device
        before = (context_lens - 1).clamp_min(0)
        tables = table_rows(requests)
        last = self._at(tables, before)
        is_empty = (context_lens <= 0)[:, None, None, None]
        # By the number of rows of a request, because layers attend the same rows.
        made: dict[int, tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor]] = {}

        def attend(query: torch.Tensor) -> torch.Tensor:
            count = len(before)
            rows = len(query) // count
            if rows not in made:
                no_parents = torch.full((count, rows), -1, dtype=torch.int32, device=device)
                metadata = self.metadata_of(requests, before, no_parents, tables)
                key, value = (x.repeat_interleave(rows, 0) for x in last)
                made[rows] = self.attention_of(metadata), key, value
            attention, key, value = made[rows]
            mixed = attention(0, query, key, value).unflatten(0, (count, rows))
            return mixed.masked_fill(is_empty, 0.0).flatten(0, 1)

        return attend

    def _at(
        self, tables: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values [R, Hkv, Dh] of one position of each request."""
        key_cache, value_cache = self.views[0]
        num_blocks, size = key_cache.shape[:2]
        blocks = self.block_table()[tables.long(), positions // size]
        # A request without a draft may have no such page.
        blocks = blocks.clamp(0, num_blocks - 1).long()
        offsets = positions % size
        return key_cache[blocks, offsets], value_cache[blocks, offsets]
