# SPDX-License-Identifier: Apache-2.0
"""Draft memory that does not grow with the context, and the target's last layer to read beside it.

A request's window is a ring: the keys and values of position p lie at slot p % size of its pages.
Attention does not care for the order of keys (their positions are rotated into them), so a full
ring is read as it lies. Everything in a window is a function of the request's tokens; one that was
dropped is simply computed again from the last `size` tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
import torch

from vllm_specplug.drafting.caches import WindowSpec, WindowTokens
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels import (
    TreeAttnMetadata,
    prefix_attn,
    tree_attn,
    tree_metadata,
)
from vllm_specplug.kernels.finite_values import make_finite
from vllm_specplug.vllm_attention.cpu import cpu_kv_layout

# Tokens of a page of a ring, on every device. Not those of the attention's caches: how many these
# have is only known once vLLM has shared out the memory, and windows count before.
WINDOW_PAGE = 32


def window_bytes(spec: WindowSpec, num_requests: int, dtype: torch.dtype) -> int:
    """Bytes of the windows of `num_requests` requests: the same whatever their contexts."""
    pages = -(-spec.size // WINDOW_PAGE)
    per_slot = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return num_requests * pages * WINDOW_PAGE * per_slot


def without_windows(
    spec: WindowSpec | None, num_requests: int, dtype: torch.dtype, available: int
) -> int:
    """Bytes that are left of `available` once a drafter has its windows.

    Raises:
        ValueError: when nothing would be left.
    """
    if spec is None:
        return available
    windows = window_bytes(spec, num_requests, dtype)
    if windows >= available:
        raise ValueError(
            f"The draft head's windows of {spec.size} tokens for {num_requests} requests take "
            f"{windows / 2**20:.0f} MiB, all of the {available / 2**20:.0f} MiB for caches. Lower "
            "--max-num-seqs, or raise VLLM_CPU_KVCACHE_SPACE."
        )
    return available - windows


class Rings:
    """Whose ring is which: one per running request.

    Args:
        num_requests: rings kept at once; the least recently used one is evicted for a new
            request.
    """

    def __init__(self, num_requests: int) -> None:
        # request id -> (ring, what was stored, as the owner counts it), least recently used first
        self.rings: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.free = list(range(num_requests - 1, -1, -1))

    def ring_of(self, req_id: str) -> tuple[int, int]:
        known = self.rings.pop(req_id, None)
        if known is not None:
            return known
        if not self.free:
            _, (ring, _) = self.rings.popitem(last=False)
            self.free.append(ring)
        return self.free.pop(), 0

    def forget(self, req_ids: Iterable[str]) -> None:
        """Frees the windows of requests that ended."""
        for req_id in req_ids:
            ring = self.rings.pop(req_id, None)
            if ring is not None:
                self.free.append(ring[0])


class WindowCache(Rings):
    """`drafting.drafter.DraftWindow` on CPU: one ring per running request.

    Args:
        spec: size of a window and shape of its keys.
        num_requests: windows kept at once; the least recently used one is evicted for a new
            request, and is computed again should its request return.
    """

    def __init__(self, spec: WindowSpec, num_requests: int, dtype: torch.dtype) -> None:
        # Rings know the position after the last one stored.
        super().__init__(num_requests)
        self.spec = spec
        self.blocks_per_request = -(-spec.size // WINDOW_PAGE)
        shape = (num_requests * self.blocks_per_request, spec.num_kv_heads, WINDOW_PAGE)
        self.kv_cache = torch.zeros(*shape, 2 * spec.head_dim, dtype=dtype)
        self.layout = cpu_kv_layout(self.kv_cache)
        self.views = self.layout.views(self.kv_cache)
        self.scale = spec.head_dim**-0.5
        # [num_requests, blocks_per_request]: the pages of each ring
        self.block_table = torch.arange(shape[0], dtype=torch.int32).view(num_requests, -1)

    def missing(self, requests: DraftRequests) -> WindowTokens:
        """Tokens of the requests' windows that are not stored yet; they count as stored."""
        size = self.spec.size
        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        for req_id, token_ids, end in zip(
            requests.req_ids, requests.token_ids, requests.context_lens, strict=True
        ):
            ring, stored = self.ring_of(req_id)
            self.rings[req_id] = (ring, end)
            at = np.arange(max(stored, end - size), end)
            tokens.append(np.asarray(token_ids[at], dtype=np.int64))
            positions.append(at)
            slots.append(ring * self.blocks_per_request * WINDOW_PAGE + at % size)
        return WindowTokens(
            *(
                torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))
                for parts in (tokens, positions, slots)
            )
        )

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [M, Hkv, Dh] at `slots` [M]."""
        from vllm import _custom_ops as ops

        make_finite(keys, values)
        key_cache, value_cache = self.views
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, self.layout.isa)

    def attention(
        self, requests: DraftRequests, parents: list[np.ndarray]
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Attention over the window and the rows of a tree; see the protocol."""
        starts = np.cumsum([0, *(len(p) + 1 for p in parents)])[:-1]
        metadata = tree_metadata(
            [self.rings[req_id][0] for req_id in requests.req_ids],
            starts.tolist(),
            [min(length, self.spec.size) for length in requests.context_lens],
            parents,
            self.block_table,
        )

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            output = torch.empty_like(query)
            tree_attn(
                query, *self.views, output, metadata, self.scale, self.layout,
                tail_key=key, tail_value=value,
            )  # fmt: skip
            return output

        return attend


class PagedTargetCache:
    """`drafting.drafter.TargetCache` over the target's last attention layer, on CPU.

    Args:
        kv_cache: that layer's cache.
        block_table: returns [B, max_blocks] of the current batch.
    """

    def __init__(
        self, kv_cache: torch.Tensor, block_table: Callable[[], torch.Tensor], scale: float
    ) -> None:
        self.layout = cpu_kv_layout(kv_cache)
        self.views = self.layout.views(kv_cache)
        self.block_table = block_table
        self.scale = scale

    def attention(
        self, req_indices: list[int], context_lens: list[int], rows: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Attention over the first `context_lens` positions of requests; see the protocol."""
        metadata = TreeAttnMetadata.build(
            req_indices,
            np.cumsum([0, *rows])[:-1].tolist(),
            rows,
            context_lens,
            torch.zeros(sum(rows), 1, dtype=torch.int64),
            self.block_table(),
        )

        def attend(query: torch.Tensor) -> torch.Tensor:
            output = torch.empty_like(query)
            prefix_attn(query, *self.views, output, None, metadata, self.scale, self.layout)
            return output

        return attend
