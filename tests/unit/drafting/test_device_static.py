# SPDX-License-Identifier: Apache-2.0
"""Static trees and penalties of drafts on a device against those of the host."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.unit.tree.candidates import paths_of
from vllm_specplug.drafting.device_levels import read_trees, static_levels
from vllm_specplug.drafting.device_requests import DevicePenalties
from vllm_specplug.drafting.requests import DraftPenalty
from vllm_specplug.tree import DraftTree
from vllm_specplug.tree.contextual_penalty import penalise
from vllm_specplug.tree.static_tree import build_static

WIDTHS = [1, 3, 2]


def _nodes(tree: DraftTree) -> set[tuple[tuple[int, ...], float]]:
    """Each node by its branch, with its score."""
    return {(path, round(score, 4)) for path, score in paths_of(tree).items()}


def _drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and falling log-probabilities [4, 3, 3] without ties; some are left out."""
    rng = np.random.default_rng(seed)
    ids = np.stack([[rng.permutation(50)[:3] for _ in range(3)] for _ in range(4)])
    scores = -np.sort(rng.uniform(0.1, 3.0, (4, 3, 3))).astype(np.float32)
    scores[1, 1, 2:] = scores[2, 2] = -np.inf
    return ids.astype(np.int64), scores


@pytest.mark.parametrize("seed", range(5))
def test_static_trees_are_those_of_the_host(seed: int) -> None:
    ids, scores = _drawn(seed)
    most = torch.full((4,), 10, dtype=torch.int32)
    depths = torch.tensor([3, 3, 3, 2], dtype=torch.int32)
    found = read_trees(
        static_levels(torch.from_numpy(ids), torch.from_numpy(scores), WIDTHS, most, depths, 10)
    )
    for r, tree in enumerate(found):
        deepest = int(depths[r])
        expected = build_static(ids[r, :deepest], scores[r, :deepest], WIDTHS)
        assert _nodes(tree) == _nodes(expected)
    assert [len(tree.token_ids) for tree in found] == [10, 7, 4, 4]


def test_static_trees_are_cut_to_the_best_nodes() -> None:
    ids, scores = _drawn(7)
    budgets = torch.tensor([5, 0, 1, 3], dtype=torch.int32)
    depths = torch.full((4,), 3, dtype=torch.int32)
    found = read_trees(
        static_levels(torch.from_numpy(ids), torch.from_numpy(scores), WIDTHS, budgets, depths, 5)
    )
    for r, tree in enumerate(found):
        whole = sorted(_nodes(build_static(ids[r], scores[r], WIDTHS)), key=lambda node: -node[1])
        assert _nodes(tree) == set(whole[: int(budgets[r])])


@pytest.mark.parametrize("is_reduced", [False, True])
def test_penalties_are_those_of_the_host(is_reduced: bool) -> None:
    """Requests from the second one on; token 0 is recent in one of them, and one has no penalty."""
    vocab, theta = 12, 1.3
    recent = [[3], [0, 5, 5, 11], [7, 2], [], [40, 1]]
    thetas = [2.0, theta, theta, 1.0, theta]
    draft_ids = None
    if is_reduced:
        draft_ids = torch.full((vocab,), -1)
        draft_ids[torch.tensor([0, 2, 5, 6])] = torch.arange(4)
    columns = 4 if is_reduced else vocab
    table = torch.full((5, 4), -1)
    for r, tokens in enumerate(recent):
        table[r, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    logits = torch.randn(4, 3, columns, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for r, tokens in enumerate(recent[1:]):
        kept = torch.tensor(sorted({t for t in tokens if t < vocab}), dtype=torch.int64)
        if draft_ids is not None:
            kept = draft_ids[kept]
            kept = kept[kept >= 0]
        apply = functools.partial(penalise, theta=thetas[r + 1])
        DraftPenalty(kept, apply).apply(expected[r], kept)
    assert not torch.equal(logits, expected)
    DevicePenalties(table, torch.tensor(thetas)).apply(logits, 1, draft_ids)
    torch.testing.assert_close(logits, expected)
