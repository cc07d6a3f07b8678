# SPDX-License-Identifier: Apache-2.0
"""The deferred tokens of a drafter, found by request and by cache slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

# States of a slot that has no deferred token.
_WRITTEN, _MISSING = -1, -2
# Owners of a row that belongs to no running request.
_FREE, _ENDED = -1, -2


class DeferredTokens:
    """A buffer on the host with one row per deferred token.

    It also records which cache slots hold the draft context of their token.

    Args:
        max_bytes: limit on the memory of all rows.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # One buffer per column. The last column holds the slots.
        self._buffers: list[torch.Tensor] = []
        # [rows] number of the request that owns the row
        self._owners = np.empty(0, np.int64)
        # [slots] row of the slot's deferred token, or the state of the slot
        self._states = np.empty(0, np.int64)
        # Number of rows of each running request.
        self._counts: Counter[int] = Counter()
        self.num_tokens = 0
        """Deferred tokens of running and of ended requests."""

    def put(self, columns: Sequence[torch.Tensor], owners: np.ndarray) -> bool:
        """Stores M tokens, and returns whether there was room for them.

        Rows of ended requests are dropped to make room.

        Args:
            columns: tensors of M rows. The last one holds the slots.
            owners: int64 [M] numbers of the requests.
        """
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
        """Records that the cache holds the context of these slots."""
        self._release(slots)
        self._states[slots] = _WRITTEN

    def lookup(self, slots: np.ndarray) -> tuple[np.ndarray, bool]:
        """Returns the rows of deferred tokens at these slots. Also returns whether the cache holds
        the context of all other slots."""
        self._grow_states(slots)
        states = self._states[slots]
        return states[states >= 0], not bool((states == _MISSING).any())

    def rows_of(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns the rows of some requests."""
        return np.flatnonzero(np.isin(self._owners, numbers))

    def counts(self, numbers: Sequence[int]) -> list[int]:
        """Returns the number of deferred tokens of each request."""
        return [self._counts[number] for number in numbers]

    def take(self, rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Returns a copy of some rows, by column."""
        import torch

        index = torch.from_numpy(rows)
        return tuple(buffer[index] for buffer in self._buffers)

    def end(self, numbers: Sequence[int]) -> None:
        """Marks the rows of ended requests, which other tokens may replace."""
        self._owners[self.rows_of(numbers)] = _ENDED
        for number in numbers:
            self._counts.pop(number, None)

    def _grow_states(self, slots: np.ndarray) -> None:
        num_slots = int(slots.max(initial=-1)) + 1
        if num_slots > len(self._states):
            added = max(num_slots, 2 * len(self._states)) - len(self._states)
            self._states = np.append(self._states, np.full(added, _MISSING))

    def _release(self, slots: np.ndarray) -> None:
        """Drops the deferred tokens of these slots, which get new tokens."""
        self._grow_states(slots)
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
        max_rows = self._max_bytes // row_bytes
        ended = np.flatnonzero(self._owners == _ENDED)
        if self.num_tokens - len(ended) + count > max_rows:
            return None
        excess = self.num_tokens + count - max_rows
        if excess > 0:
            # Rows are reused in any order, so the oldest ones are not known.
            self._drop(ended[:excess])
        if self.num_tokens + count > len(self._owners):
            num_rows = max(2 * len(self._owners), self.num_tokens + count)
            self._grow(columns, min(max_rows, num_rows))
        return np.flatnonzero(self._owners == _FREE)[:count]

    def _grow(self, columns: Sequence[torch.Tensor], num_rows: int) -> None:
        old, self._buffers = self._buffers, []
        for i, column in enumerate(columns):
            buffer = column.new_empty((num_rows, *column.shape[1:]))
            if old:
                buffer[: len(old[i])] = old[i]
            self._buffers.append(buffer)
        added = num_rows - len(self._owners)
        self._owners = np.append(self._owners, np.full(added, _FREE))
