# SPDX-License-Identifier: Apache-2.0
"""Committed tokens whose context keys and values are computed later or never."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_specplug.drafting.deferred_tokens import DeferredTokens

if TYPE_CHECKING:
    import torch

# Computes and stores the keys and values of M tokens. It takes columns of M rows, in the order in
# which the tokens were added. The last column holds the slots.
WriteContext = Callable[..., None]

# Maximum number of deferred tokens in one pass.
_MAX_PASS_TOKENS = 1024
# Memory for deferred hidden states: 11,000 tokens of five layers of 576 numbers, 1,600 of 4,096.
DEFERRED_BYTES = 64 << 20
# Minimum size of a pass that is timed. Shorter passes do not show the cost of a token.
_MIN_TIMED_TOKENS = 32


class ContextBacklog:
    """Keeps the committed tokens that no draft has needed yet.

    While `is_deferring` is set, tokens wait until their request is drafted for. Most requests end
    before that, and their context is never computed. `deferred_bytes` limits the memory of these
    tokens. Tokens beyond the limit are written at once, as all tokens are otherwise.

    vLLM may share a block among several requests, so the backlog records for each cache slot
    whether it holds the context of its token (`begin`). Deferred tokens are written only for
    running requests, to slots that they own.

    Args:
        write: computes and stores the context of some tokens.
        deferred_bytes: memory for deferred tokens; 0 defers none.
    """

    def __init__(self, write: WriteContext, deferred_bytes: int = 0) -> None:
        self._write = write
        self._deferred = DeferredTokens(deferred_bytes) if deferred_bytes else None
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._incomplete: set[str] = set()
        self.is_deferring = False
        """Whether new tokens wait until their request is drafted for."""
        self.token_ms = 0.0
        """Milliseconds per written token; 0 until a pass has been timed."""

    @property
    def knows_slots(self) -> bool:
        """Whether the backlog records which slots hold their context."""
        return self._deferred is not None

    def add(
        self,
        *columns: torch.Tensor,
        req_ids: Sequence[str] = (),
        owners: np.ndarray | None = None,
    ) -> None:
        """Adds M tokens.

        Args:
            columns: tensors of M rows, which must not change later.
            req_ids: requests of the step.
            owners: int64 [M] indices into `req_ids`. With None no token is deferred.
        """
        if not len(columns[0]):
            return
        if self.is_deferring and owners is not None:
            assert self._deferred is not None
            numbers = np.array([self._number_of(req_id) for req_id in req_ids], np.int64)
            if self._deferred.put(columns, numbers[owners]):
                return
        self._write_columns(columns)

    def set_deferred(self, is_deferring: bool) -> None:
        """Switches the deferral of new tokens on or off. It writes no deferred tokens."""
        self.is_deferring = is_deferring and self._deferred is not None

    # -- requests --------------------------------------------------------------------------

    def begin(self, req_id: str, slots: np.ndarray) -> None:
        """Starts or resumes a request whose prefix other requests have computed.

        Deferred tokens of the prefix are written, because other requests will probably hit it too.
        If the context of a token was dropped, the request cannot be drafted for (`is_incomplete`).
        Add all committed tokens before this call.

        Args:
            slots: cache slots of the prefix.
        """
        if self._deferred is None:
            return
        self._incomplete.discard(req_id)
        self._number_of(req_id)
        if not len(slots):
            return
        rows, is_complete = self._deferred.lookup(slots)
        self._write_rows(rows)
        if not is_complete:
            self._incomplete.add(req_id)

    def is_incomplete(self, req_id: str) -> bool:
        """Returns whether the context of any token of the request was dropped."""
        return req_id in self._incomplete

    def num_deferred(self, req_ids: Sequence[str]) -> list[int]:
        """Returns the number of deferred tokens of each request."""
        if self._deferred is None or not self._deferred.num_tokens:
            return [0] * len(req_ids)
        numbers = [self._numbers.get(req_id, -1) for req_id in req_ids]
        return self._deferred.counts(numbers)

    def write(self, req_ids: Iterable[str]) -> None:
        """Writes the deferred context of some requests. Call it before a draft for them."""
        if self._deferred is not None and self._deferred.num_tokens:
            numbers = [self._numbers[req_id] for req_id in req_ids if req_id in self._numbers]
            self._write_rows(self._deferred.rows_of(numbers))

    def forget(self, req_ids: Iterable[str]) -> None:
        """Forgets requests that ended or lose their pages.

        Their deferred tokens are kept while there is room, because another request may hit their
        blocks in the prefix cache.
        """
        if self._deferred is None:
            return
        gone = [self._numbers.pop(req_id) for req_id in req_ids if req_id in self._numbers]
        self._incomplete.difference_update(req_ids)
        if gone:
            self._deferred.end(gone)

    def _number_of(self, req_id: str) -> int:
        number = self._numbers.get(req_id)
        if number is None:
            number = self._numbers[req_id] = self._next_number
            self._next_number += 1
        return number

    def _write_rows(self, rows: np.ndarray) -> None:
        assert self._deferred is not None
        for first in range(0, len(rows), _MAX_PASS_TOKENS):
            self._write_columns(self._deferred.take(rows[first : first + _MAX_PASS_TOKENS]))

    def _write_columns(self, columns: tuple[torch.Tensor, ...]) -> None:
        import torch

        start = time.perf_counter()
        with torch.inference_mode():
            self._write(*columns)
        if self._deferred is not None:
            self._deferred.written(columns[-1].numpy())
        count = len(columns[0])
        if count >= _MIN_TIMED_TOKENS:
            now = 1e3 * (time.perf_counter() - start) / count
            self.token_ms = now if not self.token_ms else 0.8 * self.token_ms + 0.2 * now
