# SPDX-License-Identifier: Apache-2.0
"""Committed tokens whose context keys and values are computed later, many at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

# aux [M, L*Ht], positions [M], slots [M] -> computes and stores their keys and values
WriteContext = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

# Decoded tokens kept at most. A row of 128 costs about half a row of 16 (a core with AVX-512).
MAX_TOKENS = 128


class ContextBacklog:
    """Hidden states of committed tokens that no draft has needed yet.

    Where drafting does not pay, in large batches above all, the head's context is kept up for
    drafts that seldom come. It then costs a copy of hidden states per step, and one pass per
    `MAX_TOKENS` tokens.

    The slots belong to running requests only: call `flush` before any of their pages can change
    hands, else it would write into another request's, or into those of another layer.
    """

    def __init__(self, write: WriteContext, max_tokens: int = MAX_TOKENS) -> None:
        self._write = write
        self._max_tokens = max_tokens
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._num_tokens = 0

    def add(self, aux: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Takes tokens in. `aux` [M, L*Ht] and the others int64 [M] must not change later."""
        if not len(slots):
            return
        self._parts.append((aux, positions, slots))
        self._num_tokens += len(slots)
        if self._num_tokens >= self._max_tokens:
            self.flush()

    def flush(self) -> None:
        """Computes and stores what is waiting."""
        if not self._parts:
            return
        parts, self._parts, self._num_tokens = self._parts, [], 0
        if len(parts) == 1:
            self._write(*parts[0])
        else:
            self._write(*(torch.cat(column) for column in zip(*parts, strict=True)))
