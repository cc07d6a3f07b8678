# SPDX-License-Identifier: Apache-2.0
"""Which requests follow a grammar, as vLLM's scheduler sees it."""

from __future__ import annotations

from typing import Any


class ConstrainedRequests:
    """Names of running requests whose drafts go to the scheduler with their parents.

    A session whose input goes on after an answer keeps the grammar of its first turn, whatever the
    sampling parameters of a later turn say; so a name leaves when its request has ended, and not
    when it comes again. One that asks for a grammar in a later turn only gets none from vLLM: its
    parents are sent for nothing.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._names

    def update(self, scheduler_output: Any) -> None:
        """Call once a step, also in empty ones, which report what has ended."""
        # An ended name may come back in the same step, with another request behind it.
        self._names -= set(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            if params is not None and params.structured_outputs is not None:
                self._names.add(request.req_id)
