# SPDX-License-Identifier: Apache-2.0
"""The caches of a drafter: paged caches, windows, and the target's own caches.

A drafter requests a cache with a `...Spec` and receives an object with the matching protocol. There
are implementations on the host and on devices. On a host they take `DraftRequests`, and parents as
one int32 array per request for the rows after its root, as in `DraftTree.parent_indices`. On a
device they take `DeviceRequests`, and parents as int32 [R, rows]: the row of each row's parent
within its request, -1 for the first row, which is the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests

if TYPE_CHECKING:
    import torch

# Prefix of the names of draft layers in vLLM's configs.
DRAFT_LAYERS = "specplug.draft.layers"


@dataclass(frozen=True)
class DraftCacheSpec:
    """Shape of one draft layer's context cache."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window: a row at position p attends positions p - window + 1 to p. None for none."""


class DraftCache(Protocol):
    """Context keys and values of the draft layers in vLLM's paged cache."""

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, first_layer: int = 0
    ) -> None:
        """Stores keys and values [num_layers, M, Hkv, Dh] of committed tokens at `slots` [M].

        Args:
            first_layer: layer of the first keys and values.
        """

    def context_attention(
        self, table_rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> BlockAttention:
        """Returns the attention of committed tokens, each over itself and the tokens before it.

        Keys and values of the tokens before must be written. Tokens with slot -1, which only
        devices have, get undefined outputs.

        Args:
            table_rows: int32 [M], see `CommittedTokens.table_rows`.
            positions: int64 [M].
            slots: int64 [M].
        """

    def block_attention(
        self, requests: Any, rows: int, causal: bool | Sequence[bool]
    ) -> BlockAttention:
        """Returns the attention of `rows` block rows per request over its context and the block.

        Args:
            causal: whether the mask inside the block is causal, for all layers or for each.
        """

    def tree_attention(
        self, requests: Any, context_lens: torch.Tensor, parents: Any
    ) -> BlockAttention:
        """Returns the attention of tree rows over the first `context_lens` [R] slots and their own
        branch. The rows of a request are contiguous."""


class HostCache(DraftCache, Protocol):
    """A draft cache in host memory."""

    knows_slots: bool
    """Whether only this engine writes the pages, so that a record of their slots is valid."""

    def slots(self, req_index: int, num_tokens: int) -> np.ndarray:
        """Returns the slots of a request's first tokens, int64 [num_tokens].

        Args:
            req_index: index of the request in the batch.
        """


class BlockAttention(Protocol):
    """Attention of one draft forward for all requests."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [R * rows, Hq, Dh], key and value [R * rows, Hkv, Dh] -> [R * rows, Hq, Dh]."""


@dataclass(frozen=True)
class WindowSpec:
    """Shape of a window: one layer's keys and values of the last `size` tokens before an anchor."""

    size: int
    num_kv_heads: int
    head_dim: int


class DraftWindow(Protocol):
    """Keys and values of every request's last tokens, in memory that does not grow with context."""

    def missing(self, requests: Any) -> WindowTokens:
        """Returns the tokens of the requests' windows that are not stored yet, and marks them as
        stored.

        On a device the result is an upper bound: it may repeat stored tokens, and positions before
        a request's first token have slot -1.
        """

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores keys and values [M, Hkv, Dh] at `slots` [M]; skips slots of -1, which only devices
        have."""

    def tree_attention(
        self, requests: Any, context_lens: torch.Tensor, parents: Any
    ) -> RowAttention:
        """Returns the attention of tree rows over the window before `context_lens` [R] and their
        own branch, for the requests of the last `missing`."""

    def forget(self, req_ids: Iterable[str]) -> None:
        """Frees the windows of requests that ended or were preempted."""


@dataclass(frozen=True)
class WindowTokens:
    """Tokens to store in windows, [M] int64 each."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class RowAttention(Protocol):
    """Attention of tree rows, ordered by request."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [M, Hq, Dh], key and value [M, Hkv, Dh] of the rows -> [M, Hq, Dh]."""


@dataclass(frozen=True)
class TargetCacheSpec:
    """Which of the target's caches a draft attends: among the layers with this window that write
    their own keys and values, the last one's."""

    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores of a draft's queries."""
    window: int | None = None
    """Sliding window of that layer and of the draft's attention; None for full attention."""
    must_be_last: bool = False
    """Whether the target is refused if a later layer has another window."""


class TargetCache(Protocol):
    """Keys and values of a layer of the target, in vLLM's paged cache."""

    def level_attention(
        self, requests: Any, context_lens: torch.Tensor, owners: torch.Tensor
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the attention over the first `context_lens` [R] positions of each request; with a
        window, over the last `window` of them.

        Args:
            owners: int64 [n] request of each row, ascending. On a device all requests have the same
                number of rows, and the result may be used for other numbers.

        Returns:
            A function query [n, Hq, Dh] -> [n, Hq, Dh]; the output is 0 for an empty context.
        """


@dataclass(frozen=True)
class PartialCacheSpec:
    """Bounded caches for draft forwards of the target itself."""

    budget: int
    """Tokens kept per request, including the sink."""
    sink: int
    """Number of first positions that are always kept."""
    max_requests: int
    """Maximum number of requests kept at once."""
    options: tuple[str, str]
    """Names of the options that set `max_requests` and `budget`, for messages."""


class TargetForward(Protocol):
    """The target's own layers, run on anchors over partial caches."""

    def can_run(self, requests: DraftRequests | DeviceRequests) -> bool:
        """Whether there is room for all of these requests; only a device gets `DeviceRequests`."""

    def __call__(
        self, requests: DraftRequests | DeviceRequests
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs each request's anchor without committing it.

        Returns:
            The target's final normed states and its last layer's outputs before that norm,
            [R, H] each.
        """

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops partial caches of requests that ended or were preempted."""

    @property
    def captures(self) -> bool:
        """Whether calls for requests without a history may be captured in graphs."""

    def prepare(self, requests: DeviceRequests) -> bool:
        """Does the work outside the graph of a call for `requests`, which have a history.

        Returns False, without doing anything, if the requests need a call outside the graph.
        """
