# SPDX-License-Identifier: Apache-2.0
"""Removes placeholder drafts of resumed and prefix-hit requests, and limits reserved rows.

Seam: placeholders. For our methods it sets the scheduler's `dynamic_sd_lookup`, otherwise unset, to
a table of drafts per request by batch size.

Without the table, the scheduler pads a request that starts with a single row to
1 + num_speculative_tokens rows of drafts -1, so that all requests of a step have equal rows and fit
full CUDA graphs. Trees differ in size anyway, the padding can never be accepted, and every row
costs compute. A scheduler that works ahead reserves the table's rows before it knows the trees, so
the table holds the budget of one request in such a batch. `keep_reserved_rows` later cuts the
reservation to what the worker requests in each step's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_specplug.drafting.reserved_rows import ReservedRows
from vllm_specplug.engine.spec_config import tree_config
from vllm_specplug.options import RowBudget, request_budget_limit


def drafts_by_batch_size(spec: Any, scheduler_config: Any) -> list[int]:
    """Returns the maximum drafts of a request in a step of 0, 1, ... requests."""
    budget, nodes = RowBudget.of(spec, scheduler_config), int(spec.num_speculative_tokens)
    # The entry of 0 requests is that of one.
    sizes = [max(1, size) for size in range(budget.max_requests + 1)]
    if spec.tree_budget == "auto" and not scheduler_config.async_scheduling:
        # The scheduler gets the trees themselves, in the sizes that the worker chose.
        return [nodes for _ in sizes]
    if spec.tree_budget != "auto":
        nodes = min(nodes, max(budget.max_nodes, request_budget_limit(spec)))
    return [min(nodes, budget.share(size)) for size in sizes]


def keep_reserved_rows(scheduler: Any, reserved: ReservedRows) -> None:
    """Cuts the reservations of a scheduler that works ahead to those that its worker requested.

    Call it after the scheduler has processed the output. The step after the output's is scheduled
    by then; the reservations are of the step after that.
    """
    for request in scheduler.running:
        # A new list, because vLLM shares its placeholders between requests.
        if len(request.spec_token_ids) > (nodes := reserved.nodes(request.request_id)):
            request.spec_token_ids = request.spec_token_ids[:nodes]


def wrap_scheduler(original: Callable[..., None]) -> Callable[..., None]:
    """`Scheduler.__init__`, which then sets the table."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        spec = tree_config(self.vllm_config)
        if spec is not None and self.dynamic_sd_lookup is None:
            self.dynamic_sd_lookup = drafts_by_batch_size(spec, self.scheduler_config)

    return init
