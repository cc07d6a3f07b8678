# SPDX-License-Identifier: Apache-2.0
"""Windows of a draft layer over recent tokens, and caches of the target's layers.

A request's window is a ring: slot p % size of its pages holds the keys and values of position p.
Attention does not depend on the order of keys, which contain their rotary positions, so it reads a
full ring in memory order. A window depends only on the request's tokens; a dropped one is computed
again from the last `size` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specplug.drafting.caches import RowAttention, TargetCacheSpec, WindowSpec, WindowTokens
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels import (
    AttnFeatures,
    TreeAttnMetadata,
    tree_metadata,
)
from vllm_specplug.kernels.finite_values import make_finite
from vllm_specplug.kernels.masks import own_words
from vllm_specplug.vllm_attention.cpu import cpu_kv_layout
from vllm_specplug.vllm_worker.memory.draft_cache import attend_with_tail
from vllm_specplug.vllm_worker.memory.regions import Region, RegionPool

# Tokens per page of a ring, on every device. vLLM sets its own page size only after it has divided
# the memory, and windows are subtracted before.
WINDOW_PAGE = 32


def window_bytes(spec: WindowSpec, num_requests: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the windows of `num_requests` requests."""
    pages = -(-spec.size // WINDOW_PAGE)
    per_slot = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return num_requests * pages * WINDOW_PAGE * per_slot


@dataclass
class Ring(Region):
    """One request's window."""

    stored: int = 0
    """Position after the last stored token; on a device the last draft's
    `TokenHistory.len_upper_bounds`."""


class Rings(RegionPool[Ring]):
    """The windows of running requests."""

    def __init__(self, spec: WindowSpec, num_requests: int) -> None:
        super().__init__(num_requests, Ring)
        self.spec = spec
        self.blocks_per_request = -(-spec.size // WINDOW_PAGE)
        self.stride = self.blocks_per_request * WINDOW_PAGE


class WindowCache(Rings):
    """`drafting.caches.DraftWindow` on CPU: one ring per running request.

    Args:
        spec: size of a window and shape of its keys.
        num_requests: number of windows.
    """

    def __init__(self, spec: WindowSpec, num_requests: int, dtype: torch.dtype) -> None:
        super().__init__(spec, num_requests)
        shape = (num_requests * self.blocks_per_request, spec.num_kv_heads, WINDOW_PAGE)
        self.kv_cache = torch.zeros(*shape, 2 * spec.head_dim, dtype=dtype)
        self.layout = cpu_kv_layout(self.kv_cache)
        self.views = self.layout.views(self.kv_cache)
        self.scale = spec.head_dim**-0.5
        # [num_requests, blocks_per_request]: the pages of each ring
        self.block_table = torch.arange(shape[0], dtype=torch.int32).view(num_requests, -1)

    def missing(self, requests: DraftRequests) -> WindowTokens:
        """Returns the tokens that the windows do not hold yet. They count as stored."""
        tokens, positions, slots = [], [], []
        for req_id, token_ids, end in zip(
            requests.req_ids, requests.token_ids, requests.context_lens, strict=True
        ):
            ring = self.region_of(req_id)
            at = np.arange(max(ring.stored, end - self.spec.size), end)
            ring.stored = end
            tokens.append(token_ids[at])
            positions.append(at)
            slots.append(ring.index * self.stride + at % self.spec.size)
        columns = [np.concatenate(parts).astype(np.int64) for parts in (tokens, positions, slots)]
        return WindowTokens(*map(torch.from_numpy, columns))

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [M, Hkv, Dh] at `slots` [M]."""
        from vllm import _custom_ops as ops

        make_finite(keys, values)
        key_cache, value_cache = self.views
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, self.layout.isa)

    def tree_attention(
        self, requests: DraftRequests, context_lens: torch.Tensor, parents: list[np.ndarray]
    ) -> RowAttention:
        """Returns the attention over the window and a branch; see the protocol."""
        starts = np.cumsum([0, *(len(p) + 1 for p in parents)])[:-1]
        metadata = tree_metadata(
            [self.regions[req_id].index for req_id in requests.req_ids],
            starts.tolist(),
            context_lens.clamp_max(self.spec.size).tolist(),
            parents,
            self.block_table,
        )
        return lambda query, key, value: attend_with_tail(
            query, key, value, self.views, metadata, self.scale, self.layout
        )


class PagedTargetCache:
    """`drafting.caches.TargetCache` over one attention layer of the target, on CPU.

    Args:
        kv_cache: that layer's cache.
        block_table: returns [B, max_blocks] of the current batch.
    """

    def __init__(
        self,
        kv_cache: torch.Tensor,
        block_table: Callable[[], torch.Tensor],
        spec: TargetCacheSpec,
    ) -> None:
        self.layout = cpu_kv_layout(kv_cache)
        self.views = self.layout.views(kv_cache)
        self.block_table = block_table
        self.spec = spec

    def level_attention(
        self, requests: DraftRequests, context_lens: torch.Tensor, owners: torch.Tensor
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the attention over the first `context_lens` positions of requests, or the window
        at their end; see the protocol."""
        present, counts = owners.unique_consecutive(return_counts=True)
        req_indices = [requests.req_indices[r] for r in present.tolist()]
        lengths, rows = context_lens[present].tolist(), counts.tolist()
        # The tree kernel lets every row attend itself and ends its window there. So each row takes
        # the place of the context's last token, with that token's key and value.
        before = [max(length - 1, 0) for length in lengths]
        table = self.block_table()
        positions = torch.tensor(before)
        blocks = table[torch.tensor(req_indices), positions // self.layout.block_size]
        slots = blocks.long() * self.layout.block_size + positions % self.layout.block_size
        last = self.layout.gather(*self.views, slots)
        key, value = (x.repeat_interleave(counts, 0) for x in last)
        is_empty = (context_lens[present] <= 0).repeat_interleave(counts)
        metadata = TreeAttnMetadata.build(
            req_indices,
            np.cumsum([0, *rows])[:-1].tolist(),
            rows,
            before,
            own_words(rows),
            table,
        )
        features = AttnFeatures(window=self.spec.window or 0)

        def attend(query: torch.Tensor) -> torch.Tensor:
            output = attend_with_tail(
                query, key, value, self.views, metadata, self.spec.scale, self.layout, features
            )
            return output.masked_fill_(is_empty[:, None, None], 0.0)

        return attend
