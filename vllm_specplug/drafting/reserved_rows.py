# SPDX-License-Identifier: Apache-2.0
"""What a worker tells a scheduler that works ahead: how many nodes each request's next trees get.

Such a scheduler reserves rows before the trees that fill them are drafted. The worker's decision
arrives with a step's output, after the step behind it was scheduled, and holds for the one after
that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

RESERVED_ROWS_ATTRIBUTE = "specplug_reserved_rows"
"""Attribute of the runner's output that carries a `ReservedRows`."""


@dataclass(frozen=True)
class ReservedRows:
    """Nodes to reserve rows for, the root's row not included."""

    by_request: dict[str, int] = field(default_factory=dict)
    others: int = 0
    """Of requests that were not drafted for yet: what the others get on average, or as many as
    there may be where each request's budget is its own."""

    @classmethod
    def of(cls, by_request: dict[str, int]) -> ReservedRows:
        """What these requests get, and others like them."""
        count = len(by_request)
        return cls(by_request, -(-sum(by_request.values()) // count) if count else 0)

    def without(self, req_ids: Iterable[str]) -> ReservedRows:
        """The same for all but these requests, which ended."""
        gone = set(req_ids)
        kept = {name: nodes for name, nodes in self.by_request.items() if name not in gone}
        return ReservedRows(kept, self.others)

    def nodes(self, req_id: str) -> int:
        """Nodes of a request's tree that have a row."""
        return self.by_request.get(req_id, self.others)
