# SPDX-License-Identifier: Apache-2.0
"""The requests that follow a grammar, as vLLM's scheduler sees them."""

from __future__ import annotations

from typing import Any


class ConstrainedRequests:
    """The ids of running requests whose drafts go to the scheduler with their parents.

    A session, whose input goes on after an answer, keeps the grammar of its first turn whatever a
    later turn's sampling parameters say. An id therefore leaves when its request ends, not when it
    comes again. vLLM ignores a grammar that only a later turn asks for; sending parents for such a
    request does no harm.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._names

    def update(self, scheduler_output: Any) -> None:
        """Takes in a step's new and ended requests. Call it in every step, also in empty ones."""
        # A new request may reuse the id of an ended one in the same step.
        self._names -= set(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            if params is not None and params.structured_outputs is not None:
                self._names.add(request.req_id)
