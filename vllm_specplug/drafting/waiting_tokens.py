# SPDX-License-Identifier: Apache-2.0
"""Which cache slots hold the draft context of their token, and what waits to be written to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

# States of a slot beside the row in which its token waits.
_WRITTEN, _MISSING = -1, -2
# Owners of a row beside the numbers of requests.
_FREE, _ENDED = -1, -2


class DeferredTokens:
    """Rows of tokens that wait, found by request and by cache slot; on the host.

    Args:
        most_bytes: that all rows may take.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # One per column; the last one is slots.
        self._buffers: list[torch.Tensor] = []
        # [rows] number of the request each is of
        self._owners = np.empty(0, np.int64)
        # [slots] the row in which each slot's token waits, or its state
        self._states = np.empty(0, np.int64)
        # Rows of each running request that has any.
        self._counts: Counter[int] = Counter()
        self.num_tokens = 0
        """Tokens that wait, of running requests and of ended ones."""

    def put(self, columns: Sequence[torch.Tensor], owners: np.ndarray) -> bool:
        """Takes in a row of each column for each of M tokens, the last column being their slots,
        unless there is no room for them; rows of ended requests make room."""
        import torch

        slots = columns[-1].numpy()
        self._release(slots)
        rows = self._room_for(columns, len(slots))
        if rows is None:
            return False
        index = torch.from_numpy(rows)
        for buffer, column in zip(self._buffers, columns, strict=True):
            buffer[index] = column
        self._owners[rows] = owners
        self._states[slots] = rows
        self._counts.update(owners.tolist())
        self.num_tokens += len(rows)
        return True

    def written(self, slots: np.ndarray) -> None:
        """The context of the tokens at these slots is in the cache."""
        self._release(slots)
        self._states[slots] = _WRITTEN

    def lookup(self, slots: np.ndarray) -> tuple[np.ndarray, bool]:
        """The rows in which tokens at these slots wait, and whether the context of all others is
        in the cache."""
        self._reach(slots)
        states = self._states[slots]
        return states[states >= 0], not bool((states == _MISSING).any())

    def rows_of(self, numbers: Sequence[int]) -> np.ndarray:
        """The rows of some requests."""
        return np.flatnonzero(np.isin(self._owners, numbers))

    def counts(self, numbers: Sequence[int]) -> list[int]:
        """Waiting tokens of each request."""
        return [self._counts[number] for number in numbers]

    def take(self, rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """The columns of some rows, a copy."""
        import torch

        index = torch.from_numpy(rows)
        return tuple(buffer[index] for buffer in self._buffers)

    def end(self, numbers: Sequence[int]) -> None:
        """Requests ended; their tokens make room for those of others."""
        self._owners[self.rows_of(numbers)] = _ENDED
        for number in numbers:
            self._counts.pop(number, None)

    def _reach(self, slots: np.ndarray) -> None:
        most = int(slots.max(initial=-1)) + 1
        if most > len(self._states):
            more = max(most, 2 * len(self._states)) - len(self._states)
            self._states = np.append(self._states, np.full(more, _MISSING))

    def _release(self, slots: np.ndarray) -> None:
        """These slots have new tokens: what waited for them is of no use."""
        self._reach(slots)
        if self.num_tokens:
            states = self._states[slots]
            self._drop(states[states >= 0])

    def _drop(self, rows: np.ndarray) -> None:
        if len(rows):
            self._states[self._buffers[-1].numpy()[rows]] = _MISSING
            self._counts.subtract(self._owners[rows].tolist())
            self._owners[rows] = _FREE
            self.num_tokens -= len(rows)
            for number in [n for n, count in self._counts.items() if count <= 0]:
                del self._counts[number]

    def _room_for(self, columns: Sequence[torch.Tensor], count: int) -> np.ndarray | None:
        row_bytes = sum(column[0].nbytes for column in columns)
        most = self._most_bytes // row_bytes
        ended = np.flatnonzero(self._owners == _ENDED)
        if self.num_tokens - len(ended) + count > most:
            return None
        excess = self.num_tokens + count - most
        if excess > 0:
            # The oldest are not known: rows are used again in any order.
            self._drop(ended[:excess])
        if self.num_tokens + count > len(self._owners):
            self._grow(columns, min(most, max(2 * len(self._owners), self.num_tokens + count)))
        return np.flatnonzero(self._owners == _FREE)[:count]

    def _grow(self, columns: Sequence[torch.Tensor], num_rows: int) -> None:
        old, self._buffers = self._buffers, []
        for i, column in enumerate(columns):
            buffer = column.new_empty((num_rows, *column.shape[1:]))
            if old:
                buffer[: len(old[i])] = old[i]
            self._buffers.append(buffer)
        more = num_rows - len(self._owners)
        self._owners = np.append(self._owners, np.full(more, _FREE))
