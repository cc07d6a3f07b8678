# SPDX-License-Identifier: Apache-2.0
"""Trees on targets with recurrent states against plain decoding, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e.families import WINDOW_PROMPTS
from tests.e2e.hybrid_pairs import WRONG, compared, engines, target
from tests.e2e.pair import changed, core_of, sequences_of, watch_prefix_hits
from tests.e2e.requests import greedy, seeded
from vllm_specplug.vllm_attention.state_rows import StateStep

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.own_process(timeout_s=1500),
    pytest.mark.usefixtures("float32_states"),
]


def test_greedy_and_seeded() -> None:
    counts = compared(engines(), least_accepted=60)
    assert counts.skipping > 20, counts


def test_wrong_parents_and_wrong_commits_show() -> None:
    made = engines()
    for wrong in WRONG:
        with changed(*wrong), pytest.raises(AssertionError, match="differs"):
            compared(made)
    # Nothing of it is left behind.
    compared(made, least_accepted=60)


def test_one_state_per_sequence() -> None:
    """Caches are laid out as without speculation: same pages, and one block per state."""
    from vllm.v1.kv_cache_interface import MambaSpec

    made = engines()
    plain, tree = (core_of(llm).scheduler for llm in (made.plain, made.tree))
    groups = [s.kv_cache_config.kv_cache_groups for s in (plain, tree)]
    shapes = [[(g.kv_cache_spec, len(g.layer_names)) for g in each] for each in groups]
    assert shapes[0] == shapes[1]
    states = [i for i, g in enumerate(groups[1]) if isinstance(g.kv_cache_spec, MambaSpec)]
    assert len(states) == 3
    assert all(groups[1][i].kv_cache_spec.num_speculative_blocks == 0 for i in states)
    managers = tree.kv_cache_manager.coordinator.single_type_managers
    held: set[int] = set()
    schedule = tree.schedule

    def noted(*args: Any) -> Any:
        output = schedule(*args)
        for i in states:
            held.update(len(blocks) for blocks in managers[i].req_to_blocks.values())
        return output

    with patch.object(tree, "schedule", noted):
        compared(made, least_accepted=60)
    assert held == {1}
    assert made.runner.state.state_layers.row_bytes > 0


@pytest.mark.full
def test_chains() -> None:
    """A chain's state waits for acceptance as a tree's does."""
    made = engines(speculative={"tree_width": 1})
    compared(made, least_accepted=60, branching=False)


@pytest.mark.full
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
        made = engines(speculative={"tree_budget": "auto", "max_step_rows": 40})
    runner = made.runner
    measured = runner.planner.adaptive.costs.forward.rows.tolist()
    assert len(measured) > 2 and measured[0] == 1, measured
    assert {float(rows) for rows in run} == {float(rows) for rows in commits} == {*measured[1:]}
    layers = len(runner.state.state_layers.names)
    assert len(run) == layers * len(commits)
    # Once it serves, its dummies are vLLM's again, and so are its outputs.
    assert runner.step.warmup_states is None
    compared(made, least_accepted=0, branching=False)


@pytest.mark.full
def test_trained_heads() -> None:
    from tests.e2e.trained import is_accepted_as_learnt
    from tests.e2e.vision import have_torchvision

    is_accepted_as_learnt("Qwen3Next", "eagle3")
    # Its module imports Qwen3-VL's module.
    have_torchvision()
    is_accepted_as_learnt("Qwen3_5", "jetspec")


def _number(hit: tuple[str, int]) -> int:
    """vLLM's of a request; its names are "NUMBER-RANDOM"."""
    return int(hit[0].partition("-")[0])


@pytest.mark.full
def test_prefix_hits_on_generated_text() -> None:
    """A block that generated text fills keeps the state at its end.

    vLLM lets go of those whose end is passed before it looks; what is found was the last committed
    row of a step, or the first of the next.
    """
    # Blocks of 32 tokens: paths end them in most steps.
    made = engines(
        model=target(size=16),
        # By default vLLM keeps only the last state of a prompt.
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

    # The block's state is neither the running state nor the state of the row before or after it.
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
