# SPDX-License-Identifier: Apache-2.0
"""The fixed budget: the same number of nodes for every tree, within a limit on rows.

A step may verify `max_step_rows` rows. If the share of a request is too small to pay for a draft
forward, the whole batch is decoded without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specplug.options import rows_of_requests

MIN_USEFUL_NODES = 2


@dataclass
class RowBudget:
    """Equal shares of a fixed number of rows."""

    max_nodes: int
    """Maximum number of nodes of a tree, without its root."""
    max_step_rows: int
    """Maximum number of rows of a step: roots and nodes of all requests."""
    scheduler_rows: int
    """Maximum number of rows that the scheduler puts into a step."""
    max_requests: int
    """Maximum number of requests that the scheduler runs at once."""

    def rows(self, num_requests: int) -> int:
        """Returns the maximum number of rows of `num_requests` requests and their trees."""
        return rows_of_requests(
            num_requests, self.max_step_rows, self.scheduler_rows, self.max_requests
        )

    def share(self, num_requests: int) -> int:
        """Returns the nodes per request that the row limits allow."""
        return max(0, self.rows(num_requests) // num_requests - 1)

    def nodes_per_request(self, num_requests: int) -> int:
        """Returns the nodes that each of `num_requests` requests may draft; 0 for no drafts."""
        if num_requests == 0:
            return 0
        nodes = min(self.max_nodes, self.share(num_requests))
        return nodes if nodes >= min(MIN_USEFUL_NODES, self.max_nodes) else 0
