# SPDX-License-Identifier: Apache-2.0
"""Planners, drafters and batches for tests of what a planner decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.unit.budget.calibrations import calibration
from vllm_specplug.budget.adaptive_budget import AdaptiveBudget, Batch
from vllm_specplug.budget.step_cost import StepCostModel
from vllm_specplug.drafting.drafter import Drafter
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.metrics.step_stats import StepStats
from vllm_specplug.options import RowBudget
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner
from vllm_specplug.vllm_worker.cost.step_clock import StepClock

MAX_NODES = 8


def options_of(**changes: Any) -> SimpleNamespace:
    defaults = {
        "num_speculative_tokens": MAX_NODES, "tree_budget": "auto", "max_request_budget": None,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **changes})


def planner_of(
    rows: int = 512,
    draft_ms: float = 0.3,
    scheduler_rows: int | None = None,
    max_requests: int = 1,
    deepest: int = 4,
    clock: StepClock | None = None,
    **changes: Any,
) -> DraftPlanner:
    options = options_of(**changes)
    nodes = MAX_NODES if options.tree_budget == "auto" else options.tree_budget
    row_budget = RowBudget(nodes, rows, scheduler_rows or rows, max_requests)
    planner = DraftPlanner(options, row_budget, StepStats(), 1000, clock)
    if planner.is_adaptive:
        costs = StepCostModel(calibration(draft=draft_ms))
        planner.adaptive = AdaptiveBudget(costs, row_budget, deepest)
    return planner


class ChainDrafter(Drafter):
    """Chains of the asked depth; remembers what it was asked."""

    forward_depth = 4

    def __init__(self, score: float = -0.2) -> None:
        self.score = score
        self.asked: list[list[int]] = []

    def load(self, target: Any) -> None: ...

    def cache_specs(self) -> list:
        return []

    def observe(self, committed: Any) -> None: ...

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        depths = requests.forward_depths or [min(d, self.forward_depth) for d in requests.depths]
        self.asked.append(list(depths))
        return [
            DraftTree.chain(range(depth), self.score * np.arange(1, depth + 1)) for depth in depths
        ]


def requests_of(planner: DraftPlanner, extras: list[dict | None]) -> tuple[DraftRequests, Batch]:
    requests, batch = DraftRequests(), Batch()
    for i, extra in enumerate(extras):
        batch.num_roots += 1
        batch.root_context += 100
        nodes, _ = planner.nodes_for(f"r{i}", extra, len(extras))
        if nodes:
            requests.req_ids.append(f"r{i}")
            requests.token_ids.append(np.arange(100))
            requests.context_lens.append(99)
            requests.req_indices.append(i)
            requests.budgets.append(nodes)
            requests.depths.append(nodes)
    return requests, batch
