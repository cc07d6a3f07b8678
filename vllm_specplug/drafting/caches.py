# SPDX-License-Identifier: Apache-2.0
"""What a drafter is given to keep and to read: paged caches, windows, the target's own caches.

Each kind says what it needs in a `...Spec`; what it is given is a protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests

if TYPE_CHECKING:
    import torch

# Of the names of draft layers among vLLM's.
DRAFT_LAYERS = "specplug.draft.layers"


@dataclass(frozen=True)
class DraftCacheSpec:
    """Shape of one draft layer's context cache."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window: a row at position p sees positions p - window + 1 to p. None: all."""


class DraftCache(Protocol):
    """Context keys and values of the draft layers in vLLM's paged cache."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [num_layers, M, Hkv, Dh] of committed tokens at `slots` [M]."""

    def block_attention(
        self, requests: DraftRequests, rows: int, causal: bool | Sequence[bool]
    ) -> BlockAttention:
        """Attention of `rows` block rows per request over its paged context and the block.

        Args:
            causal: the mask inside the block, of all layers or of each.
        """


class HostCache(DraftCache, Protocol):
    """The cache where it is in the host's own memory."""

    knows_slots: bool
    """Whether only this engine writes the pages, so that a record of their slots stays true."""

    def slots(self, req_index: int, num_tokens: int) -> np.ndarray:
        """int64 [num_tokens], the slots of a request's first tokens; `req_index` is its place in
        the batch."""


class DeviceCache(DraftCache, Protocol):
    """The cache on devices that can draft without the host (`Drafter.drafts_on_device`)."""

    def block_attention(
        self, requests: DraftRequests | DeviceRequests, rows: int, causal: bool | Sequence[bool]
    ) -> BlockAttention:
        """See `DraftCache`."""

    def tree_attention(
        self,
        requests: DraftRequests | DeviceRequests,
        context_lens: torch.Tensor,
        parent_rows: torch.Tensor,
    ) -> BlockAttention:
        """Attention of tree rows over the first `context_lens` [R] slots and their own branch.

        Args:
            parent_rows: int32 [R, rows], of each request's rows the row of its parent; -1 for its
                first, which is the root.
        """


class BranchCache(DraftCache, Protocol):
    """The cache where trees are made on the host."""

    def branch_attention(
        self, requests: DraftRequests, context_lens: Sequence[int], parents: list[np.ndarray]
    ) -> BlockAttention:
        """Attention of tree rows over the first `context_lens` [R] slots and their own branch.

        The rows of each request lie together; the first is its root, the others have parents as in
        `DraftTree.parent_indices`.
        """


class BlockAttention(Protocol):
    """Attention of one draft forward, all requests at once."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [R * rows, Hq, Dh], key and value [R * rows, Hkv, Dh] -> [R * rows, Hq, Dh]."""


@dataclass(frozen=True)
class WindowSpec:
    """A drafter's own keys and values of the last `size` tokens before each anchor: one layer."""

    size: int
    num_kv_heads: int
    head_dim: int


class DraftWindow(Protocol):
    """Keys and values of every request's last tokens, in memory that does not grow with context."""

    def missing(self, requests: DraftRequests) -> WindowTokens:
        """Tokens of the requests' windows that are not stored yet; they count as stored."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [M, Hkv, Dh] at `slots` [M]."""

    def attention(self, requests: DraftRequests, parents: list[np.ndarray]) -> RowAttention:
        """Attention over the window and the rows of a tree: row 0 of each request is its anchor,
        the others have parents as in `DraftTree.parent_indices`."""

    def forget(self, req_ids: Iterable[str]) -> None:
        """Frees the windows of requests that ended."""


class DeviceWindow(Protocol):
    """`DraftWindow` on devices that can draft without the host."""

    def missing(self, requests: DraftRequests | DeviceRequests) -> WindowTokens:
        """See `DraftWindow`. Of `DeviceRequests`, a bound of what is missing: tokens that are
        stored already are stored again, and what is before a request's first token has slot -1."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [M, Hkv, Dh] at `slots` [M]; nothing at -1."""

    def tree_attention(
        self,
        requests: DraftRequests | DeviceRequests,
        context_lens: torch.Tensor,
        parent_rows: torch.Tensor,
    ) -> RowAttention:
        """Attention of tree rows over the window before `context_lens` [R] and their own branch,
        for the requests of the last `missing`.

        Args:
            parent_rows: int32 [R, rows], see `DeviceCache.tree_attention`.
        """

    def forget(self, req_ids: Iterable[str]) -> None:
        """See `DraftWindow`."""


@dataclass(frozen=True)
class WindowTokens:
    """Tokens to be stored in windows, [M] int64 each."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class RowAttention(Protocol):
    """Attention of tree rows, requests one after the other."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [M, Hq, Dh], key and value [M, Hkv, Dh] of the rows -> [M, Hq, Dh]."""


class TargetCache(Protocol):
    """Keys and values of the target's last layer, in vLLM's paged cache."""

    def attention(
        self, req_indices: list[int], context_lens: list[int], rows: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Attention over the first `context_lens` positions of some requests.

        Args:
            req_indices: rows of the block table.
            rows: query rows of each request, one after the other.

        Returns:
            query [sum(rows), Hq, Dh] -> [sum(rows), Hq, Dh]; zeros where the context is empty.
        """


class DeviceTargetCache(Protocol):
    """`TargetCache` on devices that can draft without the host."""

    def level_attention(
        self, requests: DraftRequests | DeviceRequests, context_lens: torch.Tensor
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Attention over the first `context_lens` [R] positions of each request.

        Returns:
            query [R * rows, Hq, Dh], as many rows for each request -> [R * rows, Hq, Dh]; zeros
            where the context is empty.
        """


@dataclass(frozen=True)
class PartialCacheSpec:
    """Bounded caches for draft forwards of the target itself."""

    budget: int
    """Tokens kept per request, the sink included."""
    sink: int
    """First positions that are always kept."""
    refresh: int
    """Committed tokens after which the kept positions are chosen again."""
    max_requests: int
    """Requests kept at once."""
    options: tuple[str, str]
    """Names of the options that set `max_requests` and `budget`, for messages."""


class TargetForward(Protocol):
    """The target's own layers, run on anchors over partial caches."""

    def can_run(self, requests: DraftRequests | DeviceRequests) -> bool:
        """Whether there is room for all of these requests at once. Only a device gets
        `DeviceRequests`."""

    def __call__(
        self, requests: DraftRequests | DeviceRequests
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs each request's anchor; commits nothing.

        Returns:
            The target's final normed states and its last layer's outputs before that norm,
            [R, H] each.
        """

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops partial caches of requests that ended or were preempted."""

    @property
    def captures(self) -> bool:
        """Whether graphs may hold a call for requests without a history."""

    def prepare(self, requests: DeviceRequests) -> bool:
        """Does what a graph does not hold of a call for `requests`, which have a history. False
        where they need a call without one; then nothing was done."""
