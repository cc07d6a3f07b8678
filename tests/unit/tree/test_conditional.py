# SPDX-License-Identifier: Apache-2.0
"""Trees over conditional distributions are the best paths, whatever the branches say."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from vllm_specplug.tree import build_tree
from vllm_specplug.tree.conditional import grow_tree

Path = tuple[int, ...]


class Model:
    """A random distribution over V tokens for every branch."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.rng = vocab, np.random.default_rng(seed)
        self.table: dict[Path, np.ndarray] = {}
        self.calls: list[int] = []

    def log_probs(self, path: Path) -> np.ndarray:
        if path not in self.table:
            logits = 2.0 * self.rng.standard_normal(self.vocab)
            self.table[path] = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        return self.table[path]

    def expand(self) -> Any:
        frontier: list[Path] = []

        def expand(depth: int, parents: np.ndarray, tokens: np.ndarray) -> Any:
            nonlocal frontier
            if depth == 1:
                frontier = [()]
            else:
                frontier = [
                    (*frontier[p], t)
                    for p, t in zip(parents.tolist(), tokens.tolist(), strict=True)
                ]
            self.calls.append(len(frontier))
            rows = np.stack([self.log_probs(path) for path in frontier])
            order = np.argsort(-rows, axis=1, kind="stable")
            return order.astype(np.int64), np.take_along_axis(rows, order, 1)

        return expand


def paths_of(tree: Any) -> set[Path]:
    return {
        tuple(int(tree.token_ids[n]) for n in tree.path_to(node)) for node in range(tree.num_nodes)
    }


@pytest.mark.parametrize("budget", [1, 2, 7, 20, 84])
@pytest.mark.parametrize("seed", range(5))
def test_the_best_paths_are_found(budget: int, seed: int) -> None:
    model = Model(4, seed)
    tree = grow_tree(model.expand(), budget, tree_width=4, tree_depth=3)
    tree.validate()
    scores = {
        path: sum(float(model.log_probs(path[:i])[path[i]]) for i in range(len(path)))
        for depth in (1, 2, 3)
        for path in product(range(4), repeat=depth)
    }
    best = sorted(scores, key=lambda path: -scores[path])[:budget]
    assert paths_of(tree) == set(best)
    assert tree.num_nodes == min(budget, len(scores))
    assert (np.diff(tree.scores) <= 0).all()
    assert tree.scores[-1] == pytest.approx(scores[best[-1]], abs=1e-5)
    assert max(model.calls) <= budget


def test_equal_branches_give_the_marginal_builders_tree() -> None:
    rng = np.random.default_rng(3)
    rows = -np.sort(rng.gumbel(size=(6, 9)).astype(np.float32) * 2, axis=1)[:, ::-1]
    rows = -np.sort(-(rows - np.log(np.exp(rows).sum(1, keepdims=True))), axis=1)
    ids = np.tile(np.arange(9), (6, 1))

    def expand(depth: int, parents: np.ndarray, tokens: np.ndarray) -> Any:
        return np.tile(ids[depth - 1], (len(tokens), 1)), np.tile(rows[depth - 1], (len(tokens), 1))

    for budget, width, depth in product((1, 5, 40), (1, 3, 9), (1, 4, 6)):
        tree = grow_tree(expand, budget, tree_width=width, tree_depth=depth)
        oracle = build_tree("best_first", ids, rows, budget, tree_width=width, tree_depth=depth)
        assert paths_of(tree) == paths_of(oracle)
        assert tree.token_ids.tolist() == oracle.token_ids.tolist()


def test_a_width_of_one_is_the_greedy_chain() -> None:
    model = Model(5, 1)
    tree = grow_tree(model.expand(), 9, tree_width=1, tree_depth=4)
    path: Path = ()
    for _ in range(4):
        path = (*path, int(model.log_probs(path).argmax()))
    assert tuple(tree.token_ids.tolist()) == path
    assert model.calls == [1, 1, 1, 1]


def test_nothing_to_draft() -> None:
    model = Model(5, 1)
    assert grow_tree(model.expand(), 0, tree_width=2, tree_depth=3).num_nodes == 0
    assert grow_tree(model.expand(), 3, tree_width=2, tree_depth=0).num_nodes == 0

    def nothing(depth: int, parents: np.ndarray, tokens: np.ndarray) -> Any:
        return np.zeros((1, 2), np.int64), np.full((1, 2), -np.inf, np.float32)

    assert grow_tree(nothing, 3, tree_width=2, tree_depth=3).num_nodes == 0
