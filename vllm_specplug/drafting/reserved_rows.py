# SPDX-License-Identifier: Apache-2.0
"""The number of nodes that a worker wants reserved for the next trees of each request.

A scheduler that works ahead reserves rows before their trees are drafted. The worker's decision
arrives with a step's output, when the next step is already scheduled, and applies to the step after
that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReservedRows:
    """Numbers of nodes to reserve rows for, excluding the roots."""

    by_request: dict[str, int] = field(default_factory=dict)
    others: int = 0
    """Nodes of requests that have not been drafted for: the average of the others, or the maximum
    if budgets are set per request."""

    @classmethod
    def of(cls, by_request: dict[str, int]) -> ReservedRows:
        """Returns the reservations of these requests; others get their average, rounded up."""
        count = len(by_request)
        return cls(by_request, -(-sum(by_request.values()) // count) if count else 0)

    def without(self, req_ids: Iterable[str]) -> ReservedRows:
        """Returns the reservations without these requests, which ended."""
        ended = set(req_ids)
        running = {name: nodes for name, nodes in self.by_request.items() if name not in ended}
        return ReservedRows(running, self.others)

    def nodes(self, req_id: str) -> int:
        """Returns the number of nodes of a request's tree that have a row."""
        return self.by_request.get(req_id, self.others)
