# SPDX-License-Identifier: Apache-2.0
"""A budget that shrinks trees as the batch grows.

A step costs about the same up to some number of verified rows and then grows with them, so
rows are the currency: each step may verify `max_step_rows` of them in all. Once a request's
share is too small for a tree worth its draft forward, nobody drafts and the batch decodes
plainly.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_USEFUL_NODES = 2


@dataclass(frozen=True)
class RowBudget:
    """Equal shares of a fixed number of rows."""

    max_nodes: int
    """Nodes one tree may have, root excluded."""
    max_step_rows: int
    """Rows (roots and nodes of all requests) one step may verify."""

    def nodes_per_request(self, num_requests: int) -> int:
        """Nodes each of `num_requests` requests may draft; 0 means decode plainly."""
        if num_requests == 0:
            return 0
        nodes = min(self.max_nodes, self.max_step_rows // num_requests - 1)
        return nodes if nodes >= min(MIN_USEFUL_NODES, self.max_nodes) else 0
