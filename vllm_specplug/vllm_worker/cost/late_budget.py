# SPDX-License-Identifier: Apache-2.0
"""The adaptive budget for trees that are built on a device.

Before a draft forward it decides from the lookups of an earlier step. Once copies of the trees have
arrived, it decides how many rows the next step to be scheduled has for each of them. A scheduler
that works ahead has scheduled the trees' own step before that: they fill the rows that were
reserved for them (`drafting.reserved_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm_specplug.budget.adaptive_budget import AdaptiveBudget, Batch, NextStep, Plan
from vllm_specplug.tree import DraftTree

if TYPE_CHECKING:
    from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner

_EMPTY = DraftTree.empty()


class LateBudget:
    """Applies a planner's adaptive budget to trees that the host reads later."""

    def __init__(self, planner: DraftPlanner) -> None:
        self.planner = planner
        # The latest lookup trees that the host has read, by running request.
        self._lookups: dict[str, DraftTree] = {}

    @property
    def budget(self) -> AdaptiveBudget:
        assert self.planner.adaptive is not None
        return self.planner.adaptive

    @property
    def deepest(self) -> int:
        """Maximum depth of a draft forward; 0 if the method has none."""
        return 0 if self.budget.gate is None else self.budget.gate.max_depth

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
        # [R] nodes of each that have a row; None if the step is not scheduled yet
        room: Sequence[int] | None,
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
        worth = [
            cap if is_fixed else min(nodes, cap)
            for nodes, cap, is_fixed in zip(kept, step.caps, step.fixed, strict=True)
        ]
        sizes = [
            min(tree.num_nodes, most)
            for tree, most in zip(trees, worth if room is None else room, strict=True)
        ]
        for tree, size, is_running in zip(trees, sizes, running, strict=True):
            if is_running and not size:
                had_any = tree.num_nodes or self.deepest
                stats.observe_plain("budget" if had_any else "no_draft")
        stats.tree_budget = max(sizes)
        wanted = zip(step.req_ids, worth, running, strict=True)
        return {req_id: nodes for req_id, nodes, is_running in wanted if is_running}

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drops requests that no longer run."""
        for req_id in req_ids:
            self._lookups.pop(req_id, None)
