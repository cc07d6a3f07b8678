# SPDX-License-Identifier: Apache-2.0
"""Graphs of whole forwards and of drafts as on CUDA, against plain vLLM."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

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


@pytest.mark.parametrize("cache", ["auto", "fp8"])
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


def test_graphs_of_other_buffers_diverge() -> None:
    """The control: a step's trees lie where no graph looks."""
    with full_graphs():
        made = engines(ahead=True)
        backend = made.runner.tree_backend
        other = graph_trees.GraphTrees(backend.limits, backend.device)
        # What the last step left would be read with another number of requests: out of bounds.
        with torch.inference_mode():
            for tensor in vars(backend.graph_trees).values():
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
        elsewhere = patch.object(backend, "graph_trees", other)
        with elsewhere, pytest.raises(AssertionError, match="request"):
            compare(made, True)


def test_adaptive_budget_from_graphs() -> None:
    """Its costs are measured with graphs of dummies that have a context."""
    with full_graphs():
        made = _compare_graphs("oracle", True, budget="auto", nodes=7)
    assert made.runner.planner.adaptive.costs.draft is not None


@pytest.mark.parametrize("method", ["jetspec", "ddtree"])
def test_block_heads_from_graphs(method: str) -> None:
    with full_graphs(), known_on_the_device(), draft_replays(ContextGraphs) as contexts:
        made = _compare_graphs(method, True, ngram_topk=0, nodes=10)
    assert len(made.runner.speculator.draft_graphs.graphs) == 3
    # As the forwards of decoding requests.
    assert len({desc.num_tokens for desc in contexts}) > 1 and len(contexts) > 4, contexts


@pytest.mark.parametrize("method", ["eagle3_tree", "mtp_tree"])
def test_draft_layers_from_graphs(method: str) -> None:
    """A head's, and the module that a target ships."""
    options: dict[str, Any] = {"ngram_topk": 0, "nodes": 10}
    with full_graphs(), known_on_the_device():
        made = engines(method, ahead=True, **options)
        with draft_replays() as replayed:
            assert _compare_graphs(method, True, **options) is made
    assert len(made.runner.speculator.draft_graphs.graphs) == 3
    assert len(replayed) > 4, replayed


def test_block_heads_under_an_adaptive_budget_from_graphs() -> None:
    """Who is drafted for is decided in every step; drafts are replays all the same."""
    with full_graphs(), known_on_the_device():
        made = engines("jetspec", ahead=True, nodes=10, budget="auto")
        freeze_costs(made, FLAT)
        with draft_replays() as replayed:
            assert compare(made, True).skipping > 1
    assert len(replayed) > 4, replayed


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
