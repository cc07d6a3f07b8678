# SPDX-License-Identifier: Apache-2.0
"""Level-by-level trees against an exhaustive search over a small conditional model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.candidates import paths_of
from vllm_specplug.tree import ROOT
from vllm_specplug.tree.beam import Frontier, draft_level_by_level

VOCAB = 4


class BranchModel:
    """log p(token | the whole branch), random but fixed by the branch."""

    def __init__(self, seed: int, num_requests: int) -> None:
        self.seed = seed
        self.paths: list[dict[int, tuple[int, ...]]] = [{ROOT: ()} for _ in range(num_requests)]
        self.calls: list[Frontier] = []

    def log_probs(self, request: int, path: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([self.seed, request, *path])
        logits = rng.normal(size=VOCAB) * 2
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    def expand(self, frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
        self.calls.append(frontier)
        ids, scores = [], []
        if frontier.depth:
            # Rows of parents point at the parents, in the frontier expanded before.
            before = self.calls[-2]
            assert (before.requests[frontier.parent_rows] == frontier.requests).all()
            assert (before.nodes[frontier.parent_rows] == frontier.parents).all()
        else:
            assert (frontier.parent_rows == ROOT).all()
        for r, node, parent, token in zip(
            frontier.requests.tolist(),
            frontier.nodes.tolist(),
            frontier.parents.tolist(),
            frontier.token_ids.tolist(),
            strict=True,
        ):
            if node != ROOT:
                self.paths[r][node] = (*self.paths[r][parent], token)
            else:
                assert parent == ROOT
            logp = self.log_probs(r, self.paths[r][node])
            order = np.argsort(-logp, kind="stable")
            ids.append(order)
            scores.append(logp[order])
        return np.array(ids), np.array(scores)

    def best_paths(self, request: int, budget: int, depth: int) -> dict[tuple[int, ...], float]:
        scored = {}
        for length in range(1, depth + 1):
            for path in itertools.product(range(VOCAB), repeat=length):
                scored[path] = sum(
                    float(self.log_probs(request, path[:i])[token]) for i, token in enumerate(path)
                )
        kept = sorted(scored, key=lambda p: -scored[p])[:budget]
        return {path: scored[path] for path in kept}


@given(
    seed=st.integers(0, 10_000),
    asked=st.lists(
        st.tuples(st.integers(0, 20) | st.just(84), st.integers(0, 4)), min_size=1, max_size=3
    ),
)
def test_best_first_is_exact_for_every_request(seed: int, asked: list[tuple[int, int]]) -> None:
    budgets, depths = map(list, zip(*asked, strict=True))
    count = len(asked)
    model = BranchModel(seed, count)
    trees = draft_level_by_level(
        [7] * count, budgets, depths, VOCAB, model.expand, frontier_width=None
    )
    for r, (tree, budget, depth) in enumerate(zip(trees, budgets, depths, strict=True)):
        expanded = [int((call.requests == r).sum()) for call in model.calls]
        assert max(expanded, default=0) <= budget
        # Without a budget or a depth never.
        assert sum(n > 0 for n in expanded) <= depth
        tree.validate()
        expected = model.best_paths(r, budget, depth)
        # In the same order: every prefix is the best tree of its size.
        assert list(paths_of(tree)) == list(expected)
        for path, score in paths_of(tree).items():
            assert score == pytest.approx(expected[path], abs=1e-4)


@pytest.mark.parametrize("least", [0.05, 0.2])
def test_children_of_improbable_nodes_are_not_drafted(least: float) -> None:
    whole, cut = BranchModel(5, 2), BranchModel(5, 2)
    args = ([3, 1], [30, 30], [4, 4], VOCAB)
    expected = draft_level_by_level(*args, whole.expand)
    found = draft_level_by_level(*args, cut.expand, min_node_prob=least)
    assert sum(map(len, cut.calls)) < sum(map(len, whole.calls))
    for r, (tree, full) in enumerate(zip(found, expected, strict=True)):
        tree.validate()
        scores = np.exp(np.concatenate(([0.0], tree.scores)))
        assert scores[tree.parent_indices + 1].min() >= least - 1e-6
        above = np.exp(np.concatenate(([0.0], full.scores)))[full.parent_indices + 1]
        kept = {path for path, up in zip(paths_of(full), above, strict=True) if up >= least}
        assert kept <= set(paths_of(tree)), r


def test_no_level_is_drafted_that_promises_too_little() -> None:
    model = BranchModel(5, 2)
    args = ([3, 1], [6, 6], [4, 4], VOCAB)
    draft_level_by_level(*args, model.expand, min_level_prob=1.2)
    # Anchors get their children whatever is asked.
    assert 1 < len(model.calls) < 4
    lone = BranchModel(5, 2)
    draft_level_by_level(*args, lone.expand, min_level_prob=3.0)
    assert len(lone.calls) == 1
    # A cap on the frontier bounds the work of each level.
    narrow = BranchModel(4, 1)
    draft_level_by_level([0], [30], [4], VOCAB, narrow.expand, frontier_width=3)
    assert max(map(len, narrow.calls)) == 3
