# SPDX-License-Identifier: Apache-2.0
"""Usual, sure, tied, masked and broken candidates give the best valid trees."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.candidates import (
    Case,
    all_paths,
    assert_best,
    cases,
    hard_cases,
    paths_of,
    usable,
)
from vllm_specplug.tree import DraftTree, build_tree
from vllm_specplug.tree.beam import Frontier, draft_level_by_level


def valid_paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    assert tree.fault(vocab_size=10) is None
    tree.validate(vocab_size=10)
    return paths_of(tree)


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@given(case=cases() | hard_cases())
def test_best_first(case: Case) -> None:
    assert_best(valid_paths_of(case.build()), all_paths(usable(case)), case.budget)


@given(case=cases() | hard_cases(), frontier_width=st.sampled_from([1, 3, None]))
def test_level_by_level(case: Case, frontier_width: int | None) -> None:
    def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(frontier), 1)
        ids, log_probs = case.token_ids[frontier.depth], case.log_probs[frontier.depth]
        return np.tile(ids, shape), np.tile(log_probs, shape)

    (tree,) = draft_level_by_level(
        [0], [case.budget], [min(len(case.log_probs), case.tree_depth)], case.tree_width, expand,
        frontier_width=frontier_width,
    )  # fmt: skip
    every = all_paths(usable(case))
    paths = valid_paths_of(tree)
    assert set(paths) <= set(every)
    if frontier_width is None:
        assert_best(paths, every, case.budget)


def test_ties_break_by_order_of_entry() -> None:
    """With all scores equal, a sibling enters the heap before a child of the same node."""
    token_ids = np.array([[1, 2], [3, 4]])
    log_probs = np.zeros((2, 2), dtype=np.float32)
    tree = build_tree(token_ids, log_probs, 6, tree_width=2, tree_depth=2)
    assert list(paths_of(tree)) == [(1,), (2,), (1, 3), (2, 3), (1, 4), (2, 4)]
