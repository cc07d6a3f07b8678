# SPDX-License-Identifier: Apache-2.0
"""What the runner remembers between the phases of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from vllm_specplug.tree import DraftTree


@dataclass
class StepRequest:
    """One request's rows in the target forward of this step."""

    first_row: int
    """First row of the flat query: prompt chunk, recomputed tokens or the root itself."""
    root_row: int
    """Row of the last token that is not a draft; its logits decide the next token."""
    end_row: int
    num_computed: int
    """Committed tokens in the cache before this step; position of `first_row`."""
    tree: DraftTree | None
    """The tree under verification; None when the plugin did not draft the rows after the root."""
    accepted_path: list[int] = field(default_factory=list)

    @property
    def context_len(self) -> int:
        """Tokens before the root, which is also the root's position."""
        return self.num_computed + self.root_row - self.first_row

    @property
    def is_linear(self) -> bool:
        """Whether the stock causal mask and positions are right for these rows."""
        return self.tree is None or self.tree.is_chain

    @property
    def decodes(self) -> bool:
        """Whether the rows are a root and its tree, nothing before it."""
        return self.first_row == self.root_row and self.tree is not None


@dataclass
class TreeStep:
    """All requests of one step, in batch order."""

    requests: list[StepRequest]

    @classmethod
    def without_drafts(cls, bounds: Sequence[int], num_computed: Sequence[int]) -> TreeStep:
        """Of R requests whose rows begin and end at `bounds` [R + 1] and none of whose rows is a
        draft, on `num_computed` [R] tokens in the cache."""
        empty = DraftTree.empty()
        return cls(
            [
                StepRequest(first, end - 1, end, computed, empty)
                for first, end, computed in zip(bounds, bounds[1:], num_computed, strict=False)
            ]
        )

    @cached_property
    def has_trees(self) -> bool:
        """Whether any request needs more than the stock causal path."""
        return any(not r.is_linear for r in self.requests)

    @cached_property
    def has_drafts(self) -> bool:
        """Whether any request has rows behind its root, whoever drafted them."""
        return any(r.end_row > r.root_row + 1 for r in self.requests)

    def last_rows(self) -> np.ndarray:
        """Row of each request's last committed token, int64 [B]."""
        rows = [r.root_row + 1 + r.accepted_path[-1] if r.accepted_path else r.root_row
                for r in self.requests]  # fmt: skip
        return np.array(rows, dtype=np.int64)

    def next_tokens(self, known: Sequence[np.ndarray]) -> np.ndarray:
        """The token after each of `committed_rows`, int64 [M]; 0 where none is known.

        Args:
            known: [B] all tokens of each request, those of this step included.
        """
        parts = []
        for r, tokens in zip(self.requests, known, strict=True):
            count = r.root_row + 1 + len(r.accepted_path) - r.first_row
            following = np.zeros(count, dtype=np.int64)
            found = tokens[r.num_computed + 1 : r.num_computed + 1 + count]
            following[: len(found)] = found
            parts.append(following)
        return np.concatenate(parts)

    def owners(self) -> np.ndarray:
        """Index of the request of each of `committed_rows`, int64 [M]."""
        counts = [r.root_row + 1 + len(r.accepted_path) - r.first_row for r in self.requests]
        return np.arange(len(counts)).repeat(counts)

    def committed_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows whose tokens are committed once the accepted paths are known.

        Returns:
            Row each token was computed in, row whose slot it owns after compaction, and its
            position; int64 [M] each.
        """
        first = np.array([r.first_row for r in self.requests])
        ends = np.array([r.root_row + 1 + len(r.accepted_path) for r in self.requests])
        computed = np.array([r.num_computed for r in self.requests])
        counts = ends - first
        stops = counts.cumsum()
        within = np.arange(counts.sum()) - (stops - counts).repeat(counts)
        slots = first.repeat(counts) + within
        rows = slots.copy()
        for r, stop in zip(self.requests, stops.tolist(), strict=True):
            if r.accepted_path:
                rows[stop - len(r.accepted_path) : stop] = (
                    r.root_row + 1 + np.array(r.accepted_path)
                )
        return rows, slots, computed.repeat(counts) + within
