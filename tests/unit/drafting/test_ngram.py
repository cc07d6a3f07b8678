# SPDX-License-Identifier: Apache-2.0
"""N-gram branches: what followed before, each continuation once, scored by experience."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.unit.drafters import requests_of
from tests.unit.tree.candidates import paths_of
from vllm_specplug.drafting.ngram import BranchStatistics, NgramBranches
from vllm_specplug.kernels.ngram_index import NgramIndexReference
from vllm_specplug.tree import DraftTree


def test_statistics_learn_and_scores_never_grow() -> None:
    statistics = BranchStatistics()
    before = statistics.scores(4, 0, 6)
    assert (np.diff(before) <= 0).all()
    for _ in range(300):
        statistics.observe(4, 0, [1, 2, 3], [9, 9, 9])
    assert statistics.scores(4, 0, 1)[0] < before[0] - 1.0
    for _ in range(600):
        statistics.observe(4, 0, [1, 2, 3], [1, 2, 3])
    assert statistics.scores(4, 0, 1)[0] > -0.2


def test_branches_end_where_their_nodes_are_right_too_seldom() -> None:
    statistics = BranchStatistics()
    weak, strong = statistics.scores(1, 2, 64), statistics.scores(4, 0, 64)
    assert 1 <= len(weak) < len(strong)
    assert min(weak[-1], strong[-1]) >= math.log(1 / 256)
    assert len(statistics.scores(4, 0, 5)) == 5
    # One that was never right keeps its first node, so that it can be seen to be right again.
    for _ in range(2000):
        statistics.observe(4, 0, [1], [2])
    assert len(statistics.scores(4, 0, 8)) == 1
    # What was learnt of one suffix length is not said of another.
    assert np.array_equal(statistics.scores(1, 2, 64), weak)


def test_lower_ranks_and_shorter_suffixes_are_trusted_less() -> None:
    statistics = BranchStatistics()
    for size in (1, 2, 3, 4):
        firsts = [float(statistics.scores(size, rank, 1)[0]) for rank in (0, 1, 2, 5)]
        assert firsts == sorted(firsts, reverse=True) and firsts[0] > firsts[1]
        assert firsts[2] == firsts[3]
    firsts = [float(statistics.scores(size, 0, 1)[0]) for size in (1, 2, 3, 4, 7)]
    assert firsts == sorted(firsts) and firsts[0] < firsts[3] == firsts[4]


def test_a_single_token_that_recurs_is_enough() -> None:
    branches = NgramBranches(count=2, max_length=3)
    found = branches.branches("a", np.array([5, 6, 7, 8, 5], dtype=np.int32), 3)
    assert [chain.token_ids.tolist() for chain in found] == [[6, 7, 8]]


def test_branches_learn_from_what_was_committed_and_forget() -> None:
    branches = NgramBranches(count=2, max_length=4)
    tokens = np.array([5, 6, 7, 8, 9, 5, 6, 7, 8], dtype=np.int32)
    first = branches.branches("a", tokens, 4)
    assert first[0].token_ids.tolist() == [9, 5, 6, 7]
    before = float(first[0].scores[0])
    for _ in range(20):
        tokens = np.append(tokens, [9, 5, 6, 7, 8]).astype(np.int32)
        last = branches.branches("a", tokens, 4)
    assert float(last[0].scores[0]) > before
    branches.forget(["a"])
    # The same name with other tokens is another request.
    assert branches.branches("a", np.array([1, 2, 3], dtype=np.int32), 4) == []


def test_a_shorter_history_under_the_same_name_starts_afresh() -> None:
    branches = NgramBranches(count=1, max_length=3)
    branches.branches("a", np.array([1, 2, 3, 1, 2, 3], dtype=np.int32), 3)
    assert branches.branches("a", np.array([4, 5], dtype=np.int32), 3) == []


def test_branches_join_a_heads_tree_without_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_specplug.kernels.make_ngram_index", NgramIndexReference)
    branches = NgramBranches(count=2, max_length=3)
    head = DraftTree.chain([1, 2], np.array([-0.1, -0.2], np.float32))
    asked = requests_of([[5, 6, 7, 8, 5]], 8, 3)
    (tree,) = branches.add_to([head], asked)
    tree.validate()
    assert set(paths_of(tree)) == {(1,), (1, 2), (6,), (6, 7), (6, 7, 8)}
