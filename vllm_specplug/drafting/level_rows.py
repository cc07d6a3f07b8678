# SPDX-License-Identifier: Apache-2.0
"""The rows of a draft level by level, as a head sees them: the same on a host and on a device.

Letters: R requests, n rows of a level, Hq/Hkv query/key heads, Dh head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_specplug.drafting.caches import (
    BlockAttention,
    DraftCache,
    DraftWindow,
    RowAttention,
    TargetCache,
)
from vllm_specplug.drafting.device_levels import DeviceFrontier
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.tree.beam import BranchRows, Frontier

# query [n, Hq, Dh] -> [n, Hq, Dh]
ContextAttention = Callable[[torch.Tensor], torch.Tensor]


class LevelRows(ABC):
    """The rows of the current level of a draft, and their attention.

    A row attends itself, its ancestors in earlier levels and a context. Every level queries the
    rows of earlier levels again, because kernels have one query row per tail row.

    Args:
        context_lens: [R] number of tokens before each anchor.
        max_position: maximum of `positions`.
    """

    depth: int
    """Depth of the rows; 0 for the anchors."""
    # int64 [n]
    token_ids: torch.Tensor
    # int64 [n] index of each row's request
    owners: torch.Tensor

    def __init__(
        self,
        requests: DraftRequests | DeviceRequests,
        context_lens: torch.Tensor,
        max_position: int,
    ) -> None:
        self.requests, self.max_position = requests, max_position
        self.context_lens = context_lens.clamp_min(0)
        # Query, key and value of each level's rows, by layer
        self._rows: defaultdict[int, list[tuple[torch.Tensor, ...]]] = defaultdict(list)
        self._contexts: dict[TargetCache, ContextAttention] = {}

    def positions(self, starts: torch.Tensor) -> torch.Tensor:
        """Returns the positions int64 [n] of the rows from the roots' positions [R]."""
        at = starts.index_select(0, self.owners) + self.depth
        return at.clamp_max(self.max_position).long()

    @abstractmethod
    def of_parents(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the state [n, ...] of each row's parent.

        Args:
            states: states of the previous level's rows. At depth 0 they are states of the requests,
                and are returned for the rows themselves.
        """

    def cache_attention(self, cache: DraftCache, starts: torch.Tensor) -> BlockAttention:
        """Returns the attention over the first `starts` [R] slots of a paged cache. Call it once
        per level."""
        attention = cache.tree_attention(self.requests, starts, self._parents())
        return lambda layer, *rows: self._attend(partial(attention, layer), layer, *rows)

    def window_attention(self, window: DraftWindow) -> RowAttention:
        """Returns the attention over a window before the anchors. Call it once per level."""
        attention = window.tree_attention(self.requests, self.context_lens, self._parents())
        return partial(self._attend, attention, 0)

    def context_attention(self, cache: TargetCache) -> ContextAttention:
        """Returns the attention over the context in a cache of the target, without ancestors."""
        if cache not in self._contexts:
            self._contexts[cache] = cache.level_attention(
                self.requests, self.context_lens, self.owners
            )
        return self._contexts[cache]

    @abstractmethod
    def _parents(self) -> Any:
        """Adds the level to the rows, and returns the parents of all rows in the caches' form."""

    @abstractmethod
    def _attend(self, attention: RowAttention, layer: int, *rows: torch.Tensor) -> torch.Tensor:
        """Returns the outputs [n, Hq, Dh] for query, key and value of the level's rows.

        Args:
            attention: attends the rows of all levels.
        """


class HostRows(LevelRows):
    """Rows of the nodes of a frontier."""

    requests: DraftRequests

    def __init__(self, requests: DraftRequests, max_position: int, device: torch.device) -> None:
        super().__init__(requests, device_tensor(requests.context_lens, device), max_position)
        self._branches = BranchRows(len(requests))
        # Per level: the request of each row
        self._owners: list[np.ndarray] = []

    def add(self, frontier: Frontier) -> None:
        """Goes to the next level."""
        self._frontier, self.depth = frontier, frontier.depth
        parents = frontier.parent_rows if frontier.depth else frontier.requests
        # One copy.
        self.token_ids, self._above, self.owners = device_tensor(
            np.stack((frontier.token_ids, parents, frontier.requests)), self.context_lens.device
        )
        self._contexts.clear()

    def of_parents(self, states: torch.Tensor) -> torch.Tensor:
        return states[self._above]

    def _parents(self) -> list[np.ndarray]:
        self._branches.add(self._frontier)
        self._owners.append(self._frontier.requests)
        return self._branches.parent_arrays()

    def _attend(self, attention: RowAttention, layer: int, *rows: torch.Tensor) -> torch.Tensor:
        self._rows[layer].append(rows)
        joined = [torch.cat(parts) for parts in zip(*self._rows[layer], strict=True)]
        count, device = len(rows[0]), rows[0].device
        if len(self.requests) == 1 or len(self._owners) == 1:
            return attention(*joined)[-count:]
        # Attention needs the rows of a request to be contiguous.
        order = np.argsort(np.concatenate(self._owners), kind="stable")
        index = device_tensor(order, device)
        outputs = attention(*(part[index] for part in joined))
        return outputs[device_tensor(np.argsort(order)[-count:], device)]


class DeviceRows(LevelRows):
    """Rows of the entries of a frontier, the same number for every request."""

    def __init__(self, requests: DeviceRequests, max_position: int) -> None:
        super().__init__(requests, requests.context_lens, max_position)
        self._requests = torch.arange(len(requests), device=self.context_lens.device)
        # Per level [R, F]: row of each row's parent within its request
        self._parent_rows: list[torch.Tensor] = []
        # Rows of a request in the levels before the previous one
        self._first = 0

    def add(self, frontier: DeviceFrontier) -> None:
        """Goes to the next level."""
        self._frontier, self.depth = frontier, frontier.depth
        self.token_ids = frontier.token_ids.flatten()
        self.owners = self._requests.repeat_interleave(frontier.token_ids.shape[1])

    def of_parents(self, states: torch.Tensor) -> torch.Tensor:
        return states[self._frontier.parent_rows] if self.depth else states

    def _parents(self) -> torch.Tensor:
        parents = self._frontier.parents.to(torch.int32)
        if self.depth:
            parents = parents + self._first
            self._first += self._frontier.parents_width
        else:
            parents = torch.full_like(parents, -1)
        self._parent_rows.append(parents)
        return torch.cat(self._parent_rows, dim=1)

    def _attend(self, attention: RowAttention, layer: int, *rows: torch.Tensor) -> torch.Tensor:
        # The rows of a request are contiguous: its root, then the entries of every frontier.
        shape = self._frontier.token_ids.shape
        self._rows[layer].append(tuple(x.reshape(*shape, *x.shape[1:]) for x in rows))
        joined = (torch.cat(x, dim=1).flatten(0, 1) for x in zip(*self._rows[layer], strict=True))
        mixed = attention(*joined)
        mixed = mixed.reshape(shape[0], -1, *mixed.shape[1:])
        return mixed[:, -shape[1] :].flatten(0, 1)
