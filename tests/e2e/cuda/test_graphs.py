# SPDX-License-Identifier: Apache-2.0
"""Graphs of whole forwards and of drafts as on CUDA, against plain vLLM."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.budgets import FLAT, freeze_costs
from tests.e2e.cuda import cuda_device
from tests.e2e.cuda.cuda_graphs import (
    draft_replays,
    full_graphs,
    known_on_the_device,
    steps_from_graphs,
)
from tests.e2e.cuda.cuda_pairs import (
    INTERPRETED,
    WINDOW_PROMPTS,
    compare,
    compare_windows,
    engines,
)
from tests.e2e.cuda.cuda_partial_caches import LONG, SELF, watching
from tests.e2e.families import engine_of
from tests.e2e.pair import Pair
from tests.e2e.requests import greedy
from vllm_specplug.vllm_v2 import graph_trees
from vllm_specplug.vllm_v2.context_graphs import ContextGraphs

pytestmark = [*INTERPRETED, pytest.mark.full]


def _compare_graphs(method: str, ahead: bool, **options: Any) -> Pair:
    """Compares with plain vLLM; forwards of decoding requests come from graphs."""
    made = engines(method, ahead=ahead, **options)
    with steps_from_graphs(made):
        assert compare(made, ahead).skipping > 1
    return made


@pytest.mark.parametrize("ahead", [False, True])
def test_ragged_trees_from_graphs(ahead: bool) -> None:
    with full_graphs():
        _compare_graphs("oracle", ahead)


@pytest.mark.parametrize("cache", ["auto", "fp8", "int8_per_token_head"])
def test_groups_and_caches_of_bytes_from_graphs(cache: str) -> None:
    """gpt-oss: windows, sinks and KV cache groups of their own; also over e4m3."""
    cuda_device.need_experts()
    with full_graphs():
        made = engines(ahead=True, target={**engine_of("GptOss"), "kv_cache_dtype": cache})
        with steps_from_graphs(made):
            if cuda_device.ON_GPU and cache == "fp8":
                made.compare_up_to_ties(WINDOW_PROMPTS, 20, margin=0.25)
            else:
                assert compare_windows(made).skipping > 1


def test_graphs_without_their_trees_diverge() -> None:
    """The control: every request is a chain."""
    kind = graph_trees.GraphTrees
    fill = kind.fill
    chains = patch.object(kind, "fill", lambda self, trees, *rest: fill(self, None, *rest))
    with full_graphs(), chains, pytest.raises(AssertionError, match="request"):
        _compare_graphs("oracle", True)


def test_adaptive_budget_from_graphs() -> None:
    """Its costs are measured with graphs of dummies that have a context."""
    with full_graphs():
        made = _compare_graphs("oracle", True, budget="auto", nodes=7)
    assert made.runner.planner.adaptive.costs.draft is not None


@pytest.mark.parametrize("budget", [10, "auto"])
def test_drafts_from_graphs(budget: int | str) -> None:
    """Of a block head and of its context; also where each step decides who is drafted for."""
    with (
        full_graphs(), known_on_the_device(), draft_replays() as drafts,
        draft_replays(ContextGraphs) as contexts,
    ):  # fmt: skip
        made = engines("jetspec", ahead=True, nodes=10, budget=budget)
        if budget == "auto":
            freeze_costs(made, FLAT)
        drafts.clear()
        with steps_from_graphs(made):
            assert compare(made, True).skipping > 1
    assert len(drafts) > 4, drafts
    # As the forwards of decoding requests.
    assert len({desc.num_tokens for desc in contexts}) > 1 and len(contexts) > 4, contexts


def test_the_target_drafts_for_itself_from_graphs() -> None:
    """Between two selections, which are launched."""
    with full_graphs(), watching() as seen:
        made = engines("tokenswift", ahead=True, ngram_topk=0, nodes=6, head=SELF)
        drafter = made.runner.drafter.drafter
        drafter.steps_from.clear()
        with draft_replays() as replayed:
            made.compare([[5, 6, 7, 8, 5, 6, 7], LONG[0]], greedy(max_tokens=14))
    assert len(replayed) > 4 and seen.chosen and seen.far < 1e-4, (replayed, seen)
    assert drafter.steps_from["self"] > len(replayed)
