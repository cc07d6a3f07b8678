# SPDX-License-Identifier: Apache-2.0
"""Usual, sure, tied, masked and broken candidates give valid trees with every builder."""

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
from vllm_specplug.tree import BUILDERS, DraftTree
from vllm_specplug.tree.beam import Frontier, draft_level_by_level


def valid_paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    assert tree.is_valid(vocab_size=10)
    tree.validate(vocab_size=10)
    return paths_of(tree)


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("builder", BUILDERS)
@given(case=cases() | hard_cases())
def test_marginal_builders(builder: str, case: Case) -> None:
    every = all_paths(usable(case))
    paths = valid_paths_of(case.build(builder))
    assert len(paths) == min(case.budget, len(every)) and set(paths) <= set(every)
    if builder == "best_first":
        assert_best(paths, every, case.budget)


@given(case=cases() | hard_cases(), frontier_width=st.sampled_from([1, 3, None]))
def test_level_by_level(case: Case, frontier_width: int | None) -> None:
    def expand(frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(frontier), 1)
        ids, log_probs = case.token_ids[frontier.depth], case.log_probs[frontier.depth]
        return np.tile(ids, shape), np.tile(log_probs, shape)

    (tree,) = draft_level_by_level(
        [0], [case.budget], [min(case.depth, case.tree_depth)], [case.tree_width], expand,
        frontier_width=frontier_width,
    )  # fmt: skip
    every = all_paths(usable(case))
    paths = valid_paths_of(tree)
    assert set(paths) <= set(every)
    if frontier_width is None:
        assert_best(paths, every, case.budget)
