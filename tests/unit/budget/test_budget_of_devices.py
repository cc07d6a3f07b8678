# SPDX-License-Identifier: Apache-2.0
"""What an adaptive budget makes of a device's costs and a block head's acceptance."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.budget.simulation import accepted_path
from tests.unit.scripts import load_script
from vllm_specplug.budget import (
    AdaptiveBudget,
    Batch,
    Calibration,
    NextStep,
    RowBudget,
    StepCostModel,
)
from vllm_specplug.tree import DraftTree, build_tree

model = load_script("../bench/gpu/acceptance_model")

DEPTH, WIDTH, NODES, CONTEXT = 15, 8, 63, 1200
# An 8B target on an H100: products by rows, bench/results/gpu_speed.md.
ROWS = (1.0, 16.0, 64.0, 128.0, 192.0, 256.0, 384.0, 512.0, 768.0, 1024.0)
FORWARD_MS = (6.4, 6.4, 6.5, 6.6, 7.0, 7.4, 9.3, 11.8, 16.9, 23.1)
CONTEXT_MS, NODE_CONTEXT_MS = 7.9e-5, 2.6e-6
DRAFT_ROWS = (2.0, 16.0, 64.0, 256.0, 512.0)
DRAFT_MS = (1.7, 1.8, 1.9, 2.7, 4.3)
REST_MS = 0.3


def step_ms(batch: int, nodes: int) -> float:
    """Of trees of `nodes` nodes, drafting left out."""
    rows = batch * (nodes + 1)
    attention = batch * CONTEXT * (CONTEXT_MS + nodes * NODE_CONTEXT_MS)
    return float(np.interp(rows, ROWS, FORWARD_MS)) + attention + REST_MS


def draft_ms(batch: int, depth: float) -> float:
    return float(np.interp(batch * (depth + 1), DRAFT_ROWS, DRAFT_MS))


def best_fixed(a: float, batch: int) -> float:
    """Tokens per millisecond of the best budget and depth."""
    choices = [
        batch * model.mean_acceptance(a, nodes, depth, WIDTH)
        / (step_ms(batch, nodes) + draft_ms(batch, depth))
        for nodes in (1, 3, 5, 7, 9, 11, 15, 20, 31, 63) for depth in (1, 3, 5, 8, 12, 15)
        if depth <= nodes
    ]  # fmt: skip
    return max(choices)


def served(a: float, batch: int, steps: int = 250) -> float:
    """Tokens per millisecond of the adaptive budget."""
    ranks = model.rank_probabilities(a, WIDTH)
    ids = np.arange(DEPTH * WIDTH).reshape(DEPTH, WIDTH)
    log_probs = np.tile(np.log(ranks), (DEPTH, 1)).astype(np.float32)
    trees = [DraftTree.empty()]
    trees += [build_tree(ids, log_probs, NODES, tree_width=WIDTH, tree_depth=d)
              for d in range(1, DEPTH + 1)]  # fmt: skip
    costs = Calibration(
        ROWS, tuple(0.95 * np.array(FORWARD_MS)), tuple(0.05 * np.array(FORWARD_MS)),
        CONTEXT_MS, NODE_CONTEXT_MS, DRAFT_ROWS, DRAFT_MS,
    )  # fmt: skip
    budget = AdaptiveBudget(StepCostModel(costs), RowBudget(NODES, 4096, 4096, batch), DEPTH)
    names, rng = [str(r) for r in range(batch)], np.random.default_rng(0)
    step = NextStep(
        names, [CONTEXT] * batch, [NODES] * batch, [DEPTH] * batch, [False] * batch,
        Batch(batch, batch * CONTEXT),
    )  # fmt: skip
    tokens = ms = 0.0
    for number in range(steps):
        plan = budget.plan(step, [DraftTree.empty()] * batch)
        depths = plan.depths.tolist()
        kept = budget.trim(plan, [trees[d] for d in depths])
        drawn = np.searchsorted(np.cumsum(ranks), rng.random((batch, DEPTH)))
        truths = (drawn + np.arange(DEPTH) * WIDTH).tolist()
        paths = [accepted_path(tree, truth) for tree, truth in zip(kept, truths, strict=True)]
        nodes = sum(tree.num_nodes for tree in kept)
        drafted = [d for d in depths if d]
        drafting = draft_ms(len(drafted), float(np.mean(drafted))) if drafted else 0.0
        verify = step_ms(batch, nodes / batch) - REST_MS
        budget.observe(names, kept, paths)
        budget.costs.observe_verify(
            batch + nodes, batch + nodes, batch * CONTEXT, verify * rng.normal(1, 0.01),
            nodes * CONTEXT, has_trees=nodes > 0,
        )  # fmt: skip
        if drafted:
            budget.costs.observe_draft(len(drafted), float(np.mean(drafted)), drafting)
        budget.costs.observe_rest(REST_MS, has_trees=nodes > 0)
        if number >= 50:
            tokens += batch + sum(map(len, paths))
            ms += verify + drafting + REST_MS
    return tokens / ms


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("task", ["GSM8K", "MT-Bench"])
def test_the_adaptive_budget_is_near_the_best_fixed_one(task: str, batch: int) -> None:
    published = model.PUBLISHED["jetspec"]
    a = model.fit(published.lengths[task], published.nodes, DEPTH, WIDTH)
    assert served(a, batch) >= 0.95 * best_fixed(a, batch)
