# SPDX-License-Identifier: Apache-2.0
"""The adaptive budget for a host that reads trees after it has launched their verification.

Before a draft forward it decides from the lookups of an earlier step. Once copies of the trees have
arrived, it decides the reservation of a step that is not scheduled yet. Until then, trees fill the
rows that were reserved for them (`drafting.reserved_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm_specplug.budget import AdaptiveBudget, Batch, NextStep, Plan
from vllm_specplug.tree import DraftTree

if TYPE_CHECKING:
    from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner

_EMPTY = DraftTree.empty()


class LateBudget:
    """Applies a planner's adaptive budget to trees that the host reads later.

    Args:
        deepest: maximum depth of a draft forward; 0 if the method has none.
    """

    def __init__(self, planner: DraftPlanner, deepest: int) -> None:
        self.planner = planner
        self.deepest = deepest
        # The latest lookup trees that the host has read, by running request.
        self._lookups: dict[str, DraftTree] = {}

    @property
    def budget(self) -> AdaptiveBudget:
        assert self.planner.adaptive is not None
        return self.planner.adaptive

    def plan(
        self,
        # [R] requests that may draft
        req_ids: Sequence[str],
        # [R] approximate number of tokens
        context_lens: Sequence[int],
        # [R] maximum nodes of each tree
        caps: Sequence[int],
        # [R] maximum useful depth
        depths: Sequence[int],
        batch: Batch,
    ) -> Plan:
        """Returns the plan with the depth of the draft forward for each request, `Plan.depths`."""
        step = NextStep(
            req_ids=req_ids,
            context_lens=context_lens,
            caps=caps,
            forward_limits=[max(0, min(depth, self.deepest)) for depth in depths],
            fixed=[self.planner.has_own_budget(req_id) for req_id in req_ids],
            batch=batch,
        )
        return self.budget.plan(step, [self._lookups.get(req_id, _EMPTY) for req_id in req_ids])

    def wanted(
        self,
        plan: Plan,
        # [R] as drafted, not cut to the reserved rows
        trees: Sequence[DraftTree],
        # [R] trees of lookups only
        lookups: Sequence[DraftTree],
        # [R] nodes of each that had a row
        room: Sequence[int],
    ) -> dict[str, int]:
        """Returns the nodes that were worth their cost, by running request."""
        step, stats = plan.step, self.planner.stats
        running = [self.planner.knows(req_id) for req_id in step.req_ids]
        for r, is_running in enumerate(running):
            if is_running:
                self._lookups[step.req_ids[r]] = lookups[r]
            else:
                plan.exclude(r)
        trees, lookups = (
            [tree if is_running else _EMPTY for tree, is_running in zip(some, running, strict=True)]
            for some in (trees, lookups)
        )
        kept = self.budget.trim_late(plan, trees, lookups)
        wanted: dict[str, int] = {}
        for r, req_id in enumerate(step.req_ids):
            if not running[r]:
                continue
            wanted[req_id] = step.caps[r]
            if not step.fixed[r]:
                wanted[req_id] = min(kept[r], step.caps[r])
            if not min(trees[r].num_nodes, room[r]):
                had_any = trees[r].num_nodes or self.deepest
                stats.observe_plain("budget" if had_any else "no_draft")
        stats.tree_budget = max(
            min(tree.num_nodes, most) for tree, most in zip(trees, room, strict=True)
        )
        return wanted

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops requests that no longer run."""
        for req_id in req_ids:
            self._lookups.pop(req_id, None)
