# SPDX-License-Identifier: Apache-2.0
"""Committed tokens whose context keys and values are computed later, many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Columns with a row for each of M tokens, in the order in which they were added: computes and
# stores the tokens' keys and values.
WriteContext = Callable[..., None]

# Decoded tokens kept at most. A row of 128 costs about half a row of 16 (a core with AVX-512).
MAX_TOKENS = 128


class ContextBacklog:
    """What a drafter keeps of committed tokens that no draft has needed yet.

    Where drafting does not pay, in large batches above all, the head's context is kept up for
    drafts that seldom come. It then costs a copy of hidden states per step, and one pass per
    `MAX_TOKENS` tokens. What is kept is bounded by `max_tokens` and one step's tokens.

    The slots belong to running requests only: call `flush` before any of their pages can change
    hands, else it would write into another request's, or into those of another layer.

    Args:
        write: takes the columns of all waiting tokens.
        max_tokens: tokens at which they are written without being asked for.
    """

    def __init__(self, write: WriteContext, max_tokens: int = MAX_TOKENS) -> None:
        self._write = write
        self._max_tokens = max_tokens
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self._num_tokens = 0

    @classmethod
    def on(cls, device: torch.device, write: WriteContext) -> ContextBacklog:
        """The backlog of a drafter on `device`.

        Other devices than CPUs have no time to win, as a step there is bound by its launches: there
        nothing waits.
        """
        return cls(write, MAX_TOKENS if device.type == "cpu" else 1)

    def add(self, *columns: torch.Tensor) -> None:
        """Takes tokens in; each column has M rows and must not change later."""
        count = len(columns[0])
        if not count:
            return
        self._parts.append(columns)
        self._num_tokens += count
        if self._num_tokens >= self._max_tokens:
            self.flush()

    def flush(self) -> None:
        """Computes and stores what is waiting."""
        if not self._parts:
            return
        import torch

        parts, self._parts, self._num_tokens = self._parts, [], 0
        with torch.inference_mode():
            if len(parts) == 1:
                self._write(*parts[0])
            else:
                self._write(*(torch.cat(column) for column in zip(*parts, strict=True)))
