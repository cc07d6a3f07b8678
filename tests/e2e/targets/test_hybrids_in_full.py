# SPDX-License-Identifier: Apache-2.0
"""More of what `test_hybrids` compares: images, other drafters, grammars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import hybrid_pairs
from tests.e2e.families import WINDOW_PROMPTS
from tests.e2e.hybrid_pairs import compared, target
from tests.e2e.pair import changed, core_of, sequences_of, watch_prefix_hits
from tests.e2e.requests import greedy, seeded
from vllm_specplug.vllm_attention.state_rows import StateStep

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.own_process(timeout_s=1500),
    pytest.mark.full,
    pytest.mark.usefixtures("float32_states"),
]

FAMILY = "Qwen3Next"


def test_chains() -> None:
    """A chain's state waits for acceptance as a tree's does."""
    made = hybrid_pairs.engines(speculative={"tree_width": 1})
    compared(made, least_accepted=60, branching=False)


def test_costs_are_measured_with_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adaptive budget starts from, in layers with a state: rows of trees and their commit,
    as many as each measured forward has; a single row is decoded."""
    monkeypatch.setenv("SPECPLUG_CACHE", str(tmp_path))
    run: list[int] = []
    commits: list[int] = []

    def noted(stock: Any, step: Any, layer: Any, trees: Any, inputs: Any, *args: Any) -> Any:
        run.append(len(inputs))
        return stock(step, layer, trees, inputs, *args)

    def committed(stock: Any, step: Any, *args: Any) -> None:
        commits.append(len(step.rows))
        stock(step, *args)

    with changed(StateStep, "run_trees", noted), changed(StateStep, "commit", committed):
        made = hybrid_pairs.engines(speculative={"tree_budget": "auto", "max_step_rows": 40})
    runner = made.runner
    measured = runner.planner.adaptive.costs.forward.rows.tolist()
    assert len(measured) > 2 and measured[0] == 1, measured
    assert {float(rows) for rows in run} == {float(rows) for rows in commits} == {*measured[1:]}
    layers = len(runner.state.state_layers.names)
    assert len(run) == layers * len(commits)
    # Once it serves, its dummies are vLLM's again, and so are its outputs.
    assert runner.step.warmup_states is None
    compared(made, least_accepted=0, branching=False)


def test_trained_heads() -> None:
    from tests.e2e.trained import is_accepted_as_learnt
    from tests.e2e.vision import have_torchvision

    is_accepted_as_learnt("Qwen3Next", "eagle3")
    # Its module imports that of Qwen3-VL.
    have_torchvision()
    is_accepted_as_learnt("Qwen3_5", "jetspec")


def _number(hit: tuple[str, int]) -> int:
    """vLLM's of a request; its names are "NUMBER-RANDOM"."""
    return int(hit[0].partition("-")[0])


def test_prefix_hits_on_generated_text() -> None:
    """A block that generated text fills keeps the state at its end.

    vLLM lets go of those whose end is passed before it looks; what is found was the last committed
    row of a step, or the first of the next.
    """
    # Blocks of 32 tokens: paths end them in most steps.
    made = hybrid_pairs.engines(
        model=target(FAMILY, size=16),
        # By default vLLM keeps the last state of a prompt alone.
        tree={"enable_prefix_caching": True, "prefix_cache_retention_interval": None},
        speculative={"num_speculative_tokens": 16, "tree_budget": 16},
    )
    size = core_of(made.tree).scheduler.block_size
    assert size == 32
    hits = watch_prefix_hits(made.tree)
    prompts = [WINDOW_PROMPTS[i % len(WINDOW_PROMPTS)][: 5 + 9 * i] for i in range(6)]
    params = [
        make(max_tokens=90, detokenize=False) for make in [greedy, lambda **kw: seeded(1, **kw)] * 3
    ]

    def both_times() -> int:
        """Prompts, then those with what was generated for them; how many of these found more than
        their prompt."""
        made.tree.reset_prefix_cache()
        expected, _ = made.compare(prompts, params, least_accepted=100)
        hits.clear()
        longer = [[*text[:-7], 11] for text in sequences_of(expected)]
        made.compare(longer, params)
        found = zip(sorted(hits.items(), key=_number), prompts, strict=True)
        return sum(count > len(prompt) for (_, count), prompt in found)

    assert both_times() >= 2, hits

    # Neither the running state nor that of the row behind or before is the block's.
    def is_lost(stock: Any, step: Any, *args: Any) -> Any:
        rows, slots = stock(step, *args)
        return rows, torch.full_like(slots, -1)

    def is_the_row_above(stock: Any, step: Any, *args: Any) -> Any:
        rows, slots = stock(step, *args)
        return torch.where(step.parents[rows] < 0, rows, step.parents[rows]), slots

    for wrong in (is_lost, is_the_row_above):
        control = changed(StateStep, "block_ends", wrong)
        with control, pytest.raises(AssertionError, match="differs"):
            both_times()
