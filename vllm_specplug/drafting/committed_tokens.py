# SPDX-License-Identifier: Apache-2.0
"""The committed tokens of a step, as a drafter observes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CommittedTokens:
    """The tokens of all requests that a step has committed and whose target forward is done."""

    # One [T, Ht] per auxiliary layer; T rows of the target forward
    aux_hidden_states: list[torch.Tensor]
    # [M] int64, row of the target forward that computed each token
    rows: torch.Tensor
    # [M] int64
    positions: torch.Tensor
    # [M] int64, slot of each token in the paged cache
    slots: torch.Tensor
    # [B] int64, row of each request's last committed token, in batch order
    last_rows: torch.Tensor | None = None
    # [M] int64, the token after each; the anchor after a request's last. Only for drafters that
    # need it
    next_token_ids: torch.Tensor | None = None
    # [T, H], the output of the target's forward. Only for drafters that need it
    output_states: torch.Tensor | None = None
    req_ids: Sequence[str] = ()
    """[B] requests of the step."""
    owners: np.ndarray | None = None
    """int64 [M], index in `req_ids` of each token's request; None if the host does not know it."""
    table_rows: torch.Tensor | None = None
    """int32 [M], row of the batch's block table of each token's request. Only for drafters with
    `attends_context`, on devices; elsewhere `owners` are these rows."""
    in_order: bool = False
    """Whether the tokens are known to be those of the first M rows, in this order."""

    def table_rows_on(self, device: torch.device) -> torch.Tensor:
        """Returns `table_rows`, or `owners` on hosts."""
        import torch

        if self.table_rows is not None:
            return self.table_rows
        assert self.owners is not None, "neither table rows nor owners"
        return torch.from_numpy(self.owners).to(device, torch.int32)

    def layer_states(self) -> torch.Tensor:
        """Returns a copy of each token's auxiliary states, concatenated: [M, L*Ht]."""
        import torch

        layers, count = self.aux_hidden_states, len(self.rows)
        if self.in_order:
            return torch.cat([hidden[:count] for hidden in layers], dim=-1)
        return torch.cat([hidden[self.rows] for hidden in layers], dim=-1)
