# SPDX-License-Identifier: Apache-2.0
"""Attention rows of drafts that the host expands level by level."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_specplug.drafting.caches import RowAttention, TargetCache
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.tree.beam import BranchRows, Frontier


def context_attention(
    cache: TargetCache, requests: DraftRequests, frontier: Frontier
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the attention of a frontier's rows over the contexts of their requests."""
    present, counts = np.unique(frontier.requests, return_counts=True)
    return cache.attention(
        [requests.req_indices[r] for r in present],
        [requests.context_lens[r] for r in present],
        counts.tolist(),
    )


class HostLevelRows:
    """Rows of all levels of a draft of R requests.

    Every level queries the rows of earlier levels again. That costs less than a kernel with fewer
    query rows than tail rows would save.
    """

    def __init__(self, num_requests: int) -> None:
        self.branches = BranchRows(num_requests)
        # Per level: the request of each row; query, key and value of the rows
        self._requests: list[np.ndarray] = []
        self._rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, frontier: Frontier) -> None:
        """Adds the nodes of a level, ordered by request."""
        self.branches.add(frontier)
        self._requests.append(frontier.requests)

    def attend(
        self, attention: RowAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Returns the attention outputs of the last level's n rows.

        Args:
            attention: attends the rows of `branches`.
            query: [n, Hq, Dh].
            key: [n, Hkv, Dh], like `value`.

        Returns:
            [n, Hq, Dh].
        """
        self._rows.append((query, key, value))
        joined = [torch.cat(parts) for parts in zip(*self._rows, strict=True)]
        if len(self.branches.parents) == 1 or len(self._rows) == 1:
            return attention(*joined)[-len(query) :]
        # Attention needs the rows of a request to be contiguous.
        order = np.argsort(np.concatenate(self._requests), kind="stable")
        index = device_tensor(order, query.device)
        outputs = attention(*(part[index] for part in joined))
        last_level = np.argsort(order)[-len(query) :]
        return outputs[device_tensor(last_level, query.device)]
