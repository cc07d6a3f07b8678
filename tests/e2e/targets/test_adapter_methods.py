# SPDX-License-Identifier: Apache-2.0
"""Every method beside LoRA adapters of the target: drafts, their context and their costs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.adapters import (
    CACHED,
    LORA,
    adapters,
    assert_costs_are_measured_with_adapters,
    batch,
    by_adapter,
)
from tests.e2e.pair import METHODS, Pair, core_of, generate, pair, watch_drafts
from tests.e2e.requests import LONG, PROMPTS, greedy

pytestmark = [pytest.mark.e2e, pytest.mark.own_process, pytest.mark.full]

# assistant_tree and mtp_tree draft for targets of their own, and the adapters are for another one.
OTHERS = sorted({*METHODS} - {"oracle", "jetspec", "tokenswift", "assistant_tree", "mtp_tree"})


def test_a_heads_context_is_of_the_same_adapter() -> None:
    """Drafts from keys and values found in the prefix cache are those from computed ones."""
    # Branches of n-grams are scored by what was right before.
    made = pair("jetspec", **LORA, **CACHED, speculative={"ngram_topk": 0})
    made.compare(**batch(PROMPTS, adapters()), least_accepted=0)
    manager, found = core_of(made.tree).scheduler.kv_cache_manager, []
    for prompt in LONG[:2]:
        for adapter in adapters():
            assert manager.reset_prefix_cache()
            cold = _drafts(made, prompt, adapter)
            assert manager.reset_prefix_cache()
            for other in adapters():
                _drafts(made, prompt, other)
            assert _drafts(made, prompt, adapter) == cold
            found.append(cold)
    trees = {str(list(drafts.values())) for drafts in found}
    assert len(trees) == len(found), "the adapters do not matter"


def _drafts(made: Pair, prompt: list[int], adapter: Any) -> dict[Any, Any]:
    """Tokens and parents of the trees of one request."""
    with watch_drafts(made.tree) as seen:
        generate(made.tree, [prompt], greedy(max_tokens=24), [adapter])
    return {known: drafted[:2] for known, drafted in seen.items()}


def test_drafts_of_the_targets_own_layers() -> None:
    """Nothing of the context is left out, and one token drafted: it is the target's next one,
    save that drafts come from the base LM head."""
    options = {"kv_budget": 200, "ngram_topk": 0, "tree_depth": 1, "tree_width": 1}
    made = pair("tokenswift", **LORA, speculative=options)
    run = batch(PROMPTS, adapters()[:3], max_tokens=48)
    run["params"] = greedy(max_tokens=48)
    nodes, accepted = by_adapter(made)
    made.compare(**run, branching=False)
    assert accepted == nodes and min(nodes.values()) > 80, (nodes, accepted)
    # The target drafts for itself without adapters.
    with patch.object(made.runner.state, "adapters", lambda rows: ([0] * len(rows), set())):
        made.compare(**run, branching=False)
    assert all(accepted[i] < 0.9 * nodes[i] for i in (1, 2)), (nodes, accepted)


def test_step_costs_are_measured_with_adapters_that_do_not_stay() -> None:
    """Those of the calibration have the numbers of real ones."""
    for method in ("ngram_tree", "tokenswift"):
        made = pair(method, **LORA, speculative={"tree_budget": "auto"})
        assert made.runner.planner.adaptive is not None
        assert made.runner.lora_manager.list_adapters() == set()
        assert_costs_are_measured_with_adapters(made)
        made.compare(**batch(PROMPTS, adapters()), least_accepted=0)


def test_other_methods() -> None:
    for method in OTHERS:
        made = pair(method, **LORA)
        made.compare(**batch([*PROMPTS, LONG[0]], adapters()), least_accepted=0)
