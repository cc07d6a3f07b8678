# SPDX-License-Identifier: Apache-2.0
"""The fixed budget: the same number of nodes for every tree, within a limit on rows.

Each step may verify `max_step_rows` rows in all. Once a request's share is too small for a tree
worth its draft forward, no request drafts and the batch decodes plainly.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specplug.options import rows_of_requests

MIN_USEFUL_NODES = 2


@dataclass
class RowBudget:
    """Equal shares of a fixed number of rows."""

    max_nodes: int
    """Nodes one tree may have, root excluded."""
    max_step_rows: int
    """Rows (roots and nodes of all requests) one step may verify."""
    scheduler_rows: int | None = None
    """Rows that the scheduler puts into one step; None where `max_step_rows` is the only limit."""
    max_requests: int = 1
    """Requests that the scheduler runs at once."""

    def rows(self, num_requests: int) -> int:
        """Rows that `num_requests` requests and their trees may fill together."""
        return rows_of_requests(
            num_requests, self.max_step_rows, self.scheduler_rows, self.max_requests
        )

    def share(self, num_requests: int) -> int:
        """Nodes that the row limits leave each of `num_requests` requests."""
        return max(0, self.rows(num_requests) // num_requests - 1)

    def nodes_per_request(self, num_requests: int) -> int:
        """Nodes each of `num_requests` requests may draft; 0 means decode plainly."""
        if num_requests == 0:
            return 0
        nodes = min(self.max_nodes, self.share(num_requests))
        return nodes if nodes >= min(MIN_USEFUL_NODES, self.max_nodes) else 0
