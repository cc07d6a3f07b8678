# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.candidates import Case, cases, columns_of, paths_of
from vllm_specplug.tree import BUILDERS, DraftTree, build_tree


def same_tree(a: DraftTree, b: DraftTree) -> bool:
    return columns_of(a) == columns_of(b)


@given(cases(), st.integers(0, 40))
def test_a_best_first_prefix_is_the_best_first_tree_of_that_budget(case, budget):
    tree = case.build("best_first")
    shorter = case.build("best_first", budget=min(budget, case.budget))
    assert same_tree(tree.prefix(shorter.num_nodes), shorter)


def slow_paper_tree(case: Case, priority) -> list[tuple[int, int, int, float]]:
    """The paper's loop with the root as node 0 and N = budget + 1, searching a plain list.

    Returns (token, parent, depth, score) of the drafted nodes, parents in the paper's numbering.
    """
    limit = case.budget + 1
    nodes = [(None, None, 0, 0.0)]
    frontier = [0]
    while frontier and len(nodes) < limit:
        # max() keeps the first of equals, and the frontier is in order of insertion.
        best = max(frontier, key=lambda n: priority(nodes[n][3], nodes[n][2]))
        frontier.remove(best)
        _, _, depth, score = nodes[best]
        if depth == case.depth:
            continue
        for rank in range(min(case.width, limit - len(nodes))):
            token = int(case.token_ids[depth, rank])
            frontier.append(len(nodes))
            nodes.append((token, best, depth + 1, score + float(case.log_probs[depth, rank])))
    return nodes[1:]


def entropy_of_next_depth(case: Case):
    """H(depth + 1) over the candidates and one token for all the rest; 0 below the last depth."""

    def entropy(depth: int) -> float:
        if depth == case.depth:
            return 0.0
        logps = [float(x) for x in case.log_probs[depth, : case.width]]
        rest = 1.0 - sum(math.exp(x) for x in logps)
        terms = [math.exp(x) * x for x in logps]
        return -sum(terms) - (rest * math.log(rest) if rest > 0 else 0.0)

    return entropy


@pytest.mark.parametrize("builder", ["accum_logp", "entropy", "hybrid"])
@given(case=cases())
def test_expansion_builders_equal_the_paper_run_slowly(builder, case):
    entropy = entropy_of_next_depth(case)
    priority = {
        "accum_logp": lambda score, depth: score,
        "entropy": lambda score, depth: entropy(depth),
        "hybrid": lambda score, depth: score + case.hybrid_lambda * entropy(depth),
    }[builder]
    expected = slow_paper_tree(case, priority)
    tree = case.build(builder)
    assert tree.token_ids.tolist() == [n[0] for n in expected]
    assert tree.parent_indices.tolist() == [n[1] - 1 for n in expected]
    assert tree.depths.tolist() == [n[2] for n in expected]
    assert tree.scores.tolist() == pytest.approx([n[3] for n in expected], abs=1e-5)


def test_best_first_breaks_ties_by_order_of_entry():
    """With all scores equal, a sibling enters the heap before a child of the same node."""
    token_ids = np.array([[1, 2], [3, 4]])
    log_probs = np.zeros((2, 2), dtype=np.float32)
    tree = build_tree("best_first", token_ids, log_probs, 6, tree_width=2, tree_depth=2)
    assert list(paths_of(tree)) == [(1,), (2,), (1, 3), (2, 3), (1, 4), (2, 4)]


@pytest.mark.parametrize("builder", BUILDERS)
def test_trees_have_their_budget_and_depth(builder):
    rng = np.random.default_rng(0)
    token_ids = np.argsort(rng.random((5, 4, 50)), axis=-1)[..., :6]
    log_probs = -np.sort(rng.exponential(2.0, (5, 4, 6)), axis=-1).astype(np.float32)
    budgets = [0, 1, 7, 30, 200]

    def built(depths: list[int]) -> list[DraftTree]:
        return [
            build_tree(builder, *candidates, tree_width=3, tree_depth=depth, hybrid_lambda=0.3)
            for *candidates, depth in zip(token_ids, log_probs, budgets, depths, strict=True)
        ]

    trees = built([4, 4, 2, 3, 9])
    assert [t.num_nodes for t in trees] == [0, 1, 7, 30, 3 + 9 + 27 + 81]
    for tree in trees:
        tree.validate()
    assert [t.max_depth for t in built([2] * 5)] == [0, 1, 2, 2, 2]


def test_unknown_builder_names_the_known_ones():
    empty = np.empty((1, 1))
    with pytest.raises(
        ValueError,
        match="tree_builder='beam' is not known; choose one of best_first, accum_logp, entropy, h",
    ):
        build_tree("beam", empty.astype(np.int64), empty, 4, tree_width=1, tree_depth=1)
