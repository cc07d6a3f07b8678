# SPDX-License-Identifier: Apache-2.0
"""The requests that a drafter drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def device_tensor(
    values: Sequence[Any] | np.ndarray[Any, Any], device: torch.device
) -> torch.Tensor:
    """Copies integers of the host to `device` as int64, without waiting for it."""
    from vllm_specplug.kernels import to_device

    return to_device(np.array(values, dtype=np.int64), device)


@dataclass(frozen=True)
class DraftPenalties:
    """The contextual penalties (`tree.contextual_penalty`) that the target's sampler will apply to
    R requests, for drafts to apply as well."""

    # [R, W] int64 last tokens of each request, -1 for none
    token_ids: torch.Tensor
    # [R] float32
    thetas: torch.Tensor

    def select(self, rows: torch.Tensor) -> DraftPenalties:
        """Returns the penalties of the requests at `rows` [n]."""
        return DraftPenalties(self.token_ids[rows], self.thetas[rows])

    def apply(self, logits: torch.Tensor, first: int, draft_ids: torch.Tensor | None) -> None:
        """Penalises logits [n, D, V'] of n requests in place, starting with request `first`.

        Args:
            draft_ids: int64 [V] draft id of each target token, -1 for none; None if both
                vocabularies are the same.
        """
        import torch

        from vllm_specplug.tree.contextual_penalty import penalise

        rows = slice(first, first + len(logits))
        tokens = self.token_ids[rows]
        if draft_ids is not None:
            kept = (tokens >= 0) & (tokens < len(draft_ids))
            tokens = torch.where(kept, draft_ids[torch.where(kept, tokens, 0)], -1)
        penalise(logits, tokens, self.thetas[rows])


@dataclass(frozen=True)
class DraftRequests:
    """The R requests to draft for in a step."""

    # [R]
    req_ids: list[str] = field(default_factory=list)
    # [R] committed tokens of each, the anchor last; views that are valid during the call only
    token_ids: list[np.ndarray] = field(default_factory=list)
    # [R] committed tokens before the anchor, which is also the anchor's position
    context_lens: list[int] = field(default_factory=list)
    # [R] row of each request in the block table
    req_indices: list[int] = field(default_factory=list)
    # [R] maximum nodes of each tree
    budgets: list[int] = field(default_factory=list)
    # [R] maximum depth of each tree
    depths: list[int] = field(default_factory=list)
    # [R] maximum depth of a draft forward; 0 for requests with lookups only. Empty for `depths`
    forward_depths: list[int] = field(default_factory=list)
    # None if no request has a penalty
    penalties: DraftPenalties | None = None
    width: int = 1
    """Maximum children per node; 1 requests chains."""
    min_node_prob: float = 0.0
    """For level drafts on the host: minimum draft probability of a node that gets children."""
    min_level_prob: float = 0.0
    """For level drafts on the host: minimum sum of these probabilities over a level of all requests
    for another level to be drafted."""

    @property
    def anchors(self) -> list[int]:
        """[R] the last committed tokens: roots of the trees, not in the target's cache yet."""
        return [int(tokens[-1]) for tokens in self.token_ids]

    def __len__(self) -> int:
        return len(self.token_ids)

    def for_forward(self) -> tuple[list[int], DraftRequests]:
        """Returns the indices of the requests that want a draft forward, and these requests."""
        if not self.forward_depths:
            return list(range(len(self))), self
        chosen = [r for r, depth in enumerate(self.forward_depths) if depth > 0]
        columns = {
            name: [values[r] for r in chosen]
            for name, values in vars(self).items()
            if isinstance(values, list) and name not in ("depths", "forward_depths") and values
        }
        penalties = self.penalties
        if penalties is not None:
            penalties = penalties.select(device_tensor(chosen, penalties.thetas.device))
        return chosen, DraftRequests(
            **columns,
            penalties=penalties,
            depths=[self.forward_depths[r] for r in chosen],
            width=self.width,
            min_node_prob=self.min_node_prob,
            min_level_prob=self.min_level_prob,
        )
