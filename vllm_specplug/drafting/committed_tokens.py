# SPDX-License-Identifier: Apache-2.0
"""The committed tokens of a step, and the buffer that passes them to the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from vllm_specplug.drafting.drafter import Drafter

# Maximum number of steps whose hidden states are kept.
_MAX_STEPS = 8


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
    """[B] requests of the step; for several steps, the requests of each in turn."""
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

    @classmethod
    def joined(cls, steps: Sequence[CommittedTokens]) -> CommittedTokens:
        """Joins the tokens of consecutive steps; `last_rows` are those of the last step."""
        if len(steps) == 1:
            return steps[0]
        import torch

        starts, first_ids = [0], [0]
        for step in steps:
            forward = step.aux_hidden_states[0] if step.aux_hidden_states else step.output_states
            assert forward is not None
            starts.append(starts[-1] + len(forward))
            first_ids.append(first_ids[-1] + len(step.req_ids))
        last = steps[-1]

        def column(name: str) -> torch.Tensor | None:
            if getattr(last, name) is None:
                return None
            return torch.cat([getattr(step, name) for step in steps])

        layers = zip(*(step.aux_hidden_states for step in steps), strict=True)
        in_order = all(
            step.in_order and end - start == len(step.rows)
            for step, start, end in zip(steps, starts, starts[1:], strict=False)
        )
        owners = None
        if last.owners is not None:
            owners = np.concatenate(
                [s.owners + first for s, first in zip(steps, first_ids, strict=False)]  # type: ignore[operator]
            )
        return cls(
            aux_hidden_states=[torch.cat(layer) for layer in layers],
            rows=torch.cat([s.rows + start for s, start in zip(steps, starts, strict=False)]),
            positions=torch.cat([step.positions for step in steps]),
            slots=torch.cat([step.slots for step in steps]),
            last_rows=None if last.last_rows is None else last.last_rows + starts[-2],
            next_token_ids=column("next_token_ids"),
            output_states=column("output_states"),
            req_ids=[req_id for step in steps for req_id in step.req_ids],
            owners=owners,
            in_order=in_order,
        )


class CommitBuffer:
    """Passes committed tokens to a drafter's `observe`, of several steps at once if it allows that.

    Steps without drafts then only keep their hidden states, which must stay valid: on a device the
    next replay of a graph would overwrite them.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.is_late = drafter.observes_late and not drafter.attends_context
        """Whether a step's tensors are read after the step."""
        self._steps: list[Callable[[], CommittedTokens]] = []

    def add(self, make: Callable[[], CommittedTokens]) -> None:
        """Adds the tokens of a step; `make` is called when the drafter observes them."""
        self._steps.append(make)
        if not self.is_late or len(self._steps) >= _MAX_STEPS:
            self.flush()

    def flush(self) -> None:
        """Passes all buffered tokens to the drafter.

        Call it before a draft forward, and before requests begin or lose their pages.
        """
        if self._steps:
            steps, self._steps = self._steps, []
            self._drafter.observe(CommittedTokens.joined([make() for make in steps]))
