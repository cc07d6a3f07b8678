# SPDX-License-Identifier: Apache-2.0
"""The requests that a drafter drafts for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def device_tensor(
    values: Sequence[Any] | np.ndarray[Any, Any], device: torch.device
) -> torch.Tensor:
    """Integers of the host as int64 on `device`, without waiting for it."""
    from vllm_specplug.kernels import to_device

    return to_device(np.array(values, dtype=np.int64), device)


@dataclass(frozen=True)
class DraftPenalty:
    """What the target's sampler will do to the logits of some tokens, for drafts to do the same."""

    # [n] int64, distinct
    token_ids: torch.Tensor
    apply: Callable[[torch.Tensor, torch.Tensor], None]
    """Takes logits [..., V] and the indices int64 [n] of these tokens in them; works in place."""


@dataclass(frozen=True)
class DraftRequests:
    """The requests to draft for in this step; R of them."""

    # [R]
    req_ids: list[str] = field(default_factory=list)
    # [R] committed tokens of each, the anchor last; views that are valid during the call only
    token_ids: list[np.ndarray] = field(default_factory=list)
    # [R] committed tokens before the anchor, which is also the anchor's position
    context_lens: list[int] = field(default_factory=list)
    # [R] row of each request in the block table
    req_indices: list[int] = field(default_factory=list)
    # [R] most nodes of each tree
    budgets: list[int] = field(default_factory=list)
    # [R] most children of a node; 1 asks for a chain
    widths: list[int] = field(default_factory=list)
    # [R] deepest node worth drafting
    depths: list[int] = field(default_factory=list)
    # [R] deepest node worth a draft forward; 0 leaves the request to lookups that cost nothing.
    # Empty: the same as `depths`
    forward_depths: list[int] = field(default_factory=list)
    # [R] the contextual penalty of each, None where it has none. Empty: no request has one
    penalties: list[DraftPenalty | None] = field(default_factory=list)
    min_node_prob: float = 0.0
    """Drafts by levels made on the host: least probability, as the head has it, of a node that gets
    children."""
    min_level_prob: float = 0.0
    """Likewise: least sum of these over a level, of all requests, for another level."""

    @property
    def anchors(self) -> list[int]:
        """[R] the last committed token of each: root of its tree, not in the target's cache yet."""
        return [int(tokens[-1]) for tokens in self.token_ids]

    def __len__(self) -> int:
        return len(self.token_ids)

    def for_forward(self) -> tuple[list[int], DraftRequests]:
        """The requests that want a draft forward, and which of the R they are."""
        if not self.forward_depths:
            return list(range(len(self))), self
        chosen = [r for r, depth in enumerate(self.forward_depths) if depth > 0]
        columns = {
            name: [values[r] for r in chosen]
            for name, values in vars(self).items()
            if isinstance(values, list) and name not in ("depths", "forward_depths") and values
        }
        return chosen, DraftRequests(
            **columns,
            depths=[self.forward_depths[r] for r in chosen],
            min_node_prob=self.min_node_prob,
            min_level_prob=self.min_level_prob,
        )
