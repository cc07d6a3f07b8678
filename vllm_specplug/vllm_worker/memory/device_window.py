# SPDX-License-Identifier: Apache-2.0
"""`window_cache` on a device: what a window lacks and what it holds is never asked of the device.

Windows are rings as on a CPU. The host knows how many tokens a request can have got since its last
draft, and so many before its anchor are stored, some of them for a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from vllm_specplug.drafting.caches import RowAttention, WindowSpec, WindowTokens
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.kernels.finite_values import make_finite
from vllm_specplug.vllm_worker.cuda_kernels import CudaKernels
from vllm_specplug.vllm_worker.memory.device_draft_cache import CudaDraftRows, table_rows
from vllm_specplug.vllm_worker.memory.draft_cache import BlockTable
from vllm_specplug.vllm_worker.memory.window_cache import WINDOW_PAGE, Rings


class DeviceWindowCache(CudaDraftRows, Rings):
    """`drafting.drafter.DeviceWindow` in memory of its own: one ring per running request.

    A ring records `TokenHistory.len_upper_bounds` of its last draft or, for requests that the host
    knows, the position after the last stored one. No request is of both kinds.
    """

    def __init__(
        self, backend: CudaKernels, spec: WindowSpec, num_requests: int, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        device = backend.device
        blocks = -(-spec.size // WINDOW_PAGE)
        self.stride = blocks * WINDOW_PAGE
        pages = torch.zeros(
            (num_requests * blocks, WINDOW_PAGE, spec.num_kv_heads, 2 * spec.head_dim),
            dtype=dtype, device=device,
        )  # fmt: skip
        # [num_requests, blocks]: the pages of each ring
        table = torch.arange(len(pages), dtype=torch.int32, device=device).view(num_requests, -1)
        CudaDraftRows.__init__(
            self, backend, [pages.transpose(1, 2)], lambda: table, spec.head_dim**-0.5
        )
        Rings.__init__(self, num_requests)
        self.write_layer = backend.cache_writer()
        # [R] int32 of the last requests
        self._tables = table[:0, 0]

    def missing(self, requests: DraftRequests | DeviceRequests) -> WindowTokens:
        """See the protocol."""
        if isinstance(requests, DeviceRequests):
            return self._before_anchors(requests)
        device, size = self.backend.device, self.spec.size
        rings, tokens, positions, slots = [], [], [], []
        for req_id, token_ids, end in zip(
            requests.req_ids, requests.token_ids, requests.context_lens, strict=True
        ):
            ring, stored = self.ring_of(req_id)
            self.rings[req_id] = (ring, end)
            at = np.arange(max(stored, end - size), end)
            rings.append(ring)
            tokens.append(token_ids[at])
            positions.append(at)
            slots.append(ring * self.stride + at % size)
        columns = [np.concatenate(parts) for parts in (tokens, positions, slots)]
        count = len(columns[0])
        # One copy.
        whole = device_tensor(np.concatenate([rings, *columns]), device)
        self._tables = whole[: len(rings)].to(torch.int32)
        return WindowTokens(*whole[len(rings) :].split(count or 1)[:3]) if count else _none(device)

    def _before_anchors(self, requests: DeviceRequests) -> WindowTokens:
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
            ring, known = self.ring_of(req_id)
            self.rings[req_id] = (ring, length)
            rings.append(ring)
            # A request of fewer tokens than are known is another than was stored.
            counts.append(min(most, length - known) if length >= known else most)
        count = sum(counts)
        owners = np.repeat(np.arange(len(counts)), counts)
        # How far before its anchor each token lies, from 1.
        back = 1 + np.arange(count) - np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        # One copy.
        whole = device_tensor(np.concatenate([rings, owners, back]), self.backend.device)
        tables, owner, behind = whole.split([len(rings), count, count])
        self._tables = tables.to(torch.int32)
        positions = requests.context_lens[owner].long() - behind
        is_there = positions >= 0
        positions = positions.clamp_min(0)
        slots = tables[owner] * self.stride + positions % size
        return WindowTokens(
            history.token_ids[history.lines[owner], positions].long(),
            positions,
            torch.where(is_there, slots, -1),
        )

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [M, Hkv, Dh] at `slots` [M]; nothing at -1."""
        make_finite(keys, values)
        self.write_layer(keys, values, self.kv_caches[0], slots)

    def tree_attention(
        self,
        requests: DraftRequests | DeviceRequests,
        # [R]
        context_lens: torch.Tensor,
        # [R, rows] int32
        parent_rows: torch.Tensor,
    ) -> RowAttention:
        """Attention over the window and a branch; see the protocol."""
        held = context_lens.clamp_max(self.spec.size)
        metadata = self.metadata_of(requests, held, parent_rows, self._tables)
        metadata.max_context = min(metadata.max_context, self.spec.size)
        return partial(self.attention_of(metadata), 0)


class PagedDeviceTargetCache(CudaDraftRows):
    """`drafting.drafter.DeviceTargetCache` over the target's last attention layer.

    Kernels of trees let every row attend itself. Here the context is read but for its last token,
    whose keys and values stand for those of each row: so a row attends the context and no more.
    """

    def __init__(
        self,
        backend: CudaKernels,
        kv_cache: torch.Tensor,
        block_table: BlockTable,
        scale: float,
    ) -> None:
        super().__init__(backend, [kv_cache], block_table, scale)

    def level_attention(
        self,
        requests: DraftRequests | DeviceRequests,
        # [R]
        context_lens: torch.Tensor,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Attention over the first `context_lens` positions of requests; see the protocol."""
        device = self.backend.device
        before = (context_lens - 1).clamp_min(0)
        tables = table_rows(requests, device)
        last = self._at(tables, before)
        is_empty = (context_lens <= 0)[:, None, None, None]
        made: dict[int, Callable[..., torch.Tensor]] = {}

        def attend(query: torch.Tensor) -> torch.Tensor:
            count = len(before)
            rows = len(query) // count
            if rows not in made:
                no_parents = torch.full((count, rows), -1, dtype=torch.int32, device=device)
                made[rows] = self.attention_of(
                    self.metadata_of(requests, before, no_parents, tables)
                )
            key, value = (x.repeat_interleave(rows, 0) for x in last)
            mixed = made[rows](0, query, key, value).unflatten(0, (count, rows))
            return mixed.masked_fill(is_empty, 0.0).flatten(0, 1)

        return attend

    def _at(
        self, tables: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, Hkv, Dh] of one position of each request."""
        key_cache, value_cache = self.views[0]
        num_blocks, size = key_cache.shape[:2]
        blocks = self.block_table()[tables.long(), positions // size]
        # A request that gets no draft may have no such page.
        blocks = blocks.clamp(0, num_blocks - 1).long()
        offsets = positions % size
        return key_cache[blocks, offsets], value_cache[blocks, offsets]


def _none(device: torch.device) -> WindowTokens:
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return WindowTokens(empty, empty, empty)
