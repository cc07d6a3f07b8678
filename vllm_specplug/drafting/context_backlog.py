# SPDX-License-Identifier: Apache-2.0
"""Committed tokens whose context keys and values are computed later, or never."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_specplug.drafting.waiting_tokens import DeferredTokens

if TYPE_CHECKING:
    import torch

# Columns with a row for each of M tokens, in the order in which they were added: computes and
# stores the tokens' keys and values. The last column is their slots.
WriteContext = Callable[..., None]

# Decoded tokens kept at most. A row of 128 costs about half a row of 16 (a core with AVX-512).
MAX_TOKENS = 128
# Tokens of one pass over what was put off.
_MOST_AT_ONCE = 1024
# Hidden states that may be put off: 11,000 tokens of five layers of 576 numbers, 1,600 of 4,096.
DEFERRED_BYTES = 64 << 20
# Passes over fewer tokens say nothing of what a token costs.
_FEWEST_TIMED = 32


class ContextBacklog:
    """What a drafter keeps of committed tokens that no draft has needed yet.

    Tokens wait in two ways. Up to `max_tokens` decoded ones are joined to one pass. And while
    drafts do not pay, `is_deferring` is set and everything waits until its request is to be drafted
    for: most requests end before that, and their context is never computed. What is kept of them
    is bounded by `put_off_bytes`; when that is full, tokens are written as they come.

    Whether a cache slot holds the context of its token is known by slot, as vLLM may give a block
    to several requests: see `begin`.

    The slots of joined tokens belong to running requests only: call `flush` before any of their
    pages can change hands, else it would write into another request's, or into those of another
    layer. What was put off is written for requests that run, to slots that are theirs.

    Args:
        write: takes the columns of all waiting tokens.
        max_tokens: tokens at which they are written without being asked for.
        put_off_bytes: 0 where nothing is put off.
    """

    def __init__(
        self,
        write: WriteContext,
        max_tokens: int = MAX_TOKENS,
        put_off_bytes: int = 0,
    ) -> None:
        self._write = write
        self._max_tokens = max_tokens
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self._num_tokens = 0
        self._waiting = DeferredTokens(put_off_bytes) if put_off_bytes else None
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._incomplete: set[str] = set()
        self.is_deferring = False
        """Whether tokens wait until their request is to be drafted for."""
        self.token_ms = 0.0
        """Milliseconds that writing a token takes, once it was seen."""

    @classmethod
    def on(
        cls, device: torch.device, write: WriteContext, knows_slots: bool = True
    ) -> ContextBacklog:
        """The backlog of a drafter on `device`; nothing is put off unless the slots of a request
        are known (`begin`).

        Other devices than CPUs have no time to win, as a step there is bound by its launches: there
        nothing waits.
        """
        if device.type != "cpu":
            return cls(write, 1)
        return cls(write, MAX_TOKENS, DEFERRED_BYTES * knows_slots)

    @property
    def knows_slots(self) -> bool:
        """Whether it is noted which slots hold their context."""
        return self._waiting is not None

    def add(
        self,
        *columns: torch.Tensor,
        req_ids: Sequence[str] = (),
        owners: np.ndarray | None = None,
    ) -> None:
        """Takes tokens in; each column has M rows and must not change later.

        Args:
            req_ids: requests of the step.
            owners: int64 [M] which of them each token is of; None where that is not known, and
                nothing is put off.
        """
        count = len(columns[0])
        if not count:
            return
        if self.is_deferring and owners is not None:
            assert self._waiting is not None
            numbers = np.array([self._number_of(req_id) for req_id in req_ids], np.int64)
            if self._waiting.put(columns, numbers[owners]):
                return
        self._parts.append(columns)
        self._num_tokens += count
        if self._num_tokens >= self._max_tokens:
            self.flush()

    def flush(self) -> None:
        """Computes and stores what is waiting and was not put off."""
        if not self._parts:
            return
        import torch

        parts, self._parts, self._num_tokens = self._parts, [], 0
        columns = parts[0]
        with torch.inference_mode():
            if len(parts) > 1:
                columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
            self._write_timed(columns)
        if self._waiting is not None:
            self._waiting.written(columns[-1].numpy())

    def set_deferred(self, is_deferring: bool) -> None:
        """From here on tokens wait until their request is drafted for, or no longer do. What was
        put off stays so."""
        if self._waiting is None:
            return
        if is_deferring and not self.is_deferring:
            self.flush()
        self.is_deferring = is_deferring

    # -- requests --------------------------------------------------------------------------

    def begin(self, req_id: str, slots: np.ndarray) -> None:
        """A request starts or resumes with these slots in the cache, computed by others; call it
        once everything committed so far was added.

        What waits of them is written: a prefix that was met again will be met again. Where the
        context of one was dropped, the request cannot be drafted for (`is_incomplete`).
        """
        if self._waiting is None:
            return
        self._incomplete.discard(req_id)
        self._number_of(req_id)
        if not len(slots):
            return
        self.flush()
        rows, is_complete = self._waiting.lookup(slots)
        self._write_rows(rows)
        if not is_complete:
            self._incomplete.add(req_id)

    def is_incomplete(self, req_id: str) -> bool:
        """Whether a request has tokens whose context was dropped."""
        return req_id in self._incomplete

    def num_waiting(self, req_ids: Sequence[str]) -> list[int]:
        """Tokens of each request that were put off."""
        if self._waiting is None or not self._waiting.num_tokens:
            return [0] * len(req_ids)
        numbers = [self._numbers.get(req_id, -1) for req_id in req_ids]
        return self._waiting.counts(numbers)

    def write(self, req_ids: Iterable[str]) -> None:
        """Computes and stores everything that waits of some requests, before they are drafted
        for."""
        self.flush()
        if self._waiting is not None and self._waiting.num_tokens:
            numbers = [self._numbers[req_id] for req_id in req_ids if req_id in self._numbers]
            self._write_rows(self._waiting.rows_of(numbers))

    def forget(self, req_ids: Iterable[str]) -> None:
        """Requests ended or lose their pages. What waits of them goes on waiting while there is
        room: the prefix cache may hand their blocks on, and a session takes its own again."""
        self.flush()
        if self._waiting is None:
            return
        gone = [self._numbers.pop(req_id) for req_id in req_ids if req_id in self._numbers]
        self._incomplete.difference_update(req_ids)
        if gone:
            self._waiting.end(gone)

    def _number_of(self, req_id: str) -> int:
        number = self._numbers.get(req_id)
        if number is None:
            number = self._numbers[req_id] = self._next_number
            self._next_number += 1
        return number

    def _write_rows(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        import torch

        assert self._waiting is not None
        with torch.inference_mode():
            for first in range(0, len(rows), _MOST_AT_ONCE):
                columns = self._waiting.take(rows[first : first + _MOST_AT_ONCE])
                self._write_timed(columns)
                self._waiting.written(columns[-1].numpy())

    def _write_timed(self, columns: tuple[torch.Tensor, ...]) -> None:
        start = time.perf_counter()
        self._write(*columns)
        count = len(columns[0])
        if count >= _FEWEST_TIMED:
            now = 1e3 * (time.perf_counter() - start) / count
            self.token_ms = now if not self.token_ms else 0.8 * self.token_ms + 0.2 * now
