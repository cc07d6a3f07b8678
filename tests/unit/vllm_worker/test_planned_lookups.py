# SPDX-License-Identifier: Apache-2.0
"""When the planner lets lookups rest."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.vllm_worker.planning import ChainDrafter, planner_of, requests_of
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.tree import DraftTree


class _FindingDrafter(ChainDrafter):
    """Finds chains of some score by looking up, before a forward or in place of one."""

    def __init__(self, score: float, has_forward: bool) -> None:
        super().__init__(score)
        self.forward_depth = 4 if has_forward else 0
        self.looked = 0

    def _find(self, requests: DraftRequests) -> list[DraftTree]:
        self.looked += 1
        return [DraftTree.chain([1], np.array([self.score]))] * len(requests)

    def lookup(self, requests: DraftRequests) -> list[DraftTree]:
        return self._find(requests) if self.forward_depth else super().lookup(requests)

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        return super().propose(requests) if self.forward_depth else self._find(requests)


@pytest.mark.parametrize("has_forward", [True, False])
@pytest.mark.parametrize(
    ("score", "extra", "looked"),
    [
        # Too improbable to be verified: looked up in every ninth of the last 90 steps.
        (-6.0, None, 16 + 10),
        (-0.01, None, 106),
        # A request that fixed its budget is drafted for.
        (-6.0, {"specplug_tree_budget": 2}, 106),
    ],
)
def test_lookups_rest_where_they_do_not_pay(
    has_forward: bool, score: float, extra: dict[str, int] | None, looked: int
) -> None:
    planner = planner_of(draft_ms=60.0)
    drafter = _FindingDrafter(score, has_forward)
    for _ in range(106):
        trees = planner.draft(drafter, *requests_of(planner, [extra, None]))
    assert drafter.looked == looked
    if score > -1.0:
        assert all(tree.num_nodes for tree in trees)
