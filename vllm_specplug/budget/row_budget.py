# SPDX-License-Identifier: Apache-2.0
"""The fixed budget: the same number of nodes for every tree, within a limit on rows.

Each step may verify `max_step_rows` rows in all. Once a request's share is too small for a tree
worth its draft forward, no request drafts and the batch decodes plainly.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_USEFUL_NODES = 2


@dataclass
class RowBudget:
    """Equal shares of a fixed number of rows."""

    max_nodes: int
    """Nodes one tree may have, root excluded."""
    max_step_rows: int
    """Rows (roots and nodes of all requests) one step may verify."""

    def share(self, num_requests: int) -> int:
        """Nodes that the row limit leaves each of `num_requests` requests."""
        return max(0, self.max_step_rows // num_requests - 1)

    def nodes_per_request(self, num_requests: int) -> int:
        """Nodes each of `num_requests` requests may draft; 0 means decode plainly."""
        if num_requests == 0:
            return 0
        nodes = min(self.max_nodes, self.share(num_requests))
        return nodes if nodes >= min(MIN_USEFUL_NODES, self.max_nodes) else 0
