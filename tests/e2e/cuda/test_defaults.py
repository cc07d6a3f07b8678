# SPDX-License-Identifier: Apache-2.0
"""Trees as on CUDA by default, against plain vLLM.

In every run: what a user of CUDA gets by default, and that a wrong mask would show.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.e2e.budgets import FLAT, freeze_costs
from tests.e2e.cuda.cuda_pairs import (
    INTERPRETED,
    PROMPTS,
    LateCopy,
    engines,
    knowing_candidates,
    late_copies,
)
from tests.e2e.pair import Counts
from tests.e2e.requests import greedy, seeded
from vllm_specplug.drafting.device_levels import read_trees
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.methods.ngram_tree.drafter import NgramTreeDrafter
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_v2 import cuda_trees
from vllm_specplug.vllm_worker.memory import drafter_memory

pytestmark = INTERPRETED


def test_trees_without_their_mask_diverge() -> None:
    """The control: every row attends the rows before it, as in a chain."""
    made = engines(ahead=True)
    chain = patch.object(
        cuda_trees, "parent_rows", lambda trees: (trees.rows.offsets - 1).to(torch.int32)
    )
    with chain, pytest.raises(AssertionError, match="request 0"):
        made.compare(PROMPTS[:1], [greedy(max_tokens=10, logprobs=2)])


def _compare_defaults(
    method: str, ahead: bool = True, budget: int | str = "auto"
) -> tuple[Counts, int]:
    """The comparison, and how often the host waited for the device in it."""
    # Long enough for lookups to find what a small target repeats.
    params = [greedy(max_tokens=24, logprobs=2), seeded(1, max_tokens=24), greedy(max_tokens=20)]
    with knowing_candidates(), late_copies():
        made = engines(method, ahead=ahead, nodes=10, budget=budget)
        speculator = made.runner.speculator
        if budget == "auto":
            # An interpreter's own would leave no room for drafts.
            freeze_costs(made, FLAT)
        LateCopy.waits = 0
        branching = method != "ngram_tree"
        _, counts = made.compare(PROMPTS, params, least_accepted=6, branching=branching)
        waits = LateCopy.waits
    assert (counts.stale > 0) == ahead, counts
    if ahead and budget == "auto":
        assert made.runner.planner.adaptive is not None and speculator.reserved is not None
    return counts, waits


@pytest.mark.parametrize("method", ["jetspec", pytest.param("ddtree", marks=pytest.mark.full)])
def test_block_heads(method: str) -> None:
    counts, waits = _compare_defaults(method)
    assert counts.skipping > 1 and not waits, (counts, waits)


@pytest.mark.full
@pytest.mark.parametrize("budget", ["auto", 10])
def test_ngram_trees(budget: int | str) -> None:
    _, waits = _compare_defaults("ngram_tree", budget=budget)
    assert not waits, waits


@pytest.mark.full
def test_a_scheduler_that_waits() -> None:
    """The control: it is told of every tree, and reads each step."""
    counts, waits = _compare_defaults("jetspec", ahead=False)
    assert counts.skipping > 1 and waits > 3, (counts, waits)


@pytest.mark.full
def test_acceptance_is_that_of_trees_made_on_the_host() -> None:
    """Tokens per draft of every path, with the same trees but for what is learnt a step late."""
    # A head with n-gram branches, and only these.
    both = ("jetspec", "ngram_tree")
    on_device = {method: _compare_defaults(method, budget=10)[0] for method in both}

    def draft(self: BlockHeadDrafter, requests: DraftRequests) -> list[DraftTree]:
        device = self.embed_tokens.device
        given = DeviceRequests.of(requests, self.options.num_nodes, device)
        rows = torch.tensor(requests.req_indices, dtype=torch.int32, device=device)
        return read_trees(self.propose_on_device(replace(given, rows=rows)))

    with (
        patch.object(BlockHeadDrafter, "draft", draft),
        patch.object(BlockHeadDrafter, "drafts_on_device", False),
        patch.object(NgramTreeDrafter, "drafts_on_device", False),
        patch.object(drafter_memory, "check_host_drafts"),
    ):
        for method, counts in on_device.items():
            of_host, waits = _compare_defaults(method, budget=10)
            assert waits > 3
            ours, theirs = (c.accepted / c.drafts for c in (counts, of_host))
            assert abs(ours - theirs) <= 0.1 * theirs, (method, counts, of_host)
