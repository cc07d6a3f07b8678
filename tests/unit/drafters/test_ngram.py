# SPDX-License-Identifier: Apache-2.0
"""N-gram branches: what followed before, each continuation once, scored by experience."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.drafters.ngram import (
    MAX_SUFFIX,
    BranchStatistics,
    NgramBranches,
    NgramIndex,
)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4), st.integers(1, 6))
def test_continuations_followed_the_same_suffix(tokens: list[int], count: int, length: int) -> None:
    index = NgramIndex()
    index.extend(tokens)
    found = index.continuations(count, length)
    assert len(found) <= count
    sizes = [size for size, _ in found]
    assert sizes == sorted(sizes, reverse=True)
    for size, branch in found:
        assert 1 <= len(branch) <= length
        suffix = tokens[len(tokens) - size :]
        assert any(
            tokens[at : at + size] == suffix
            and tokens[at + size : at + size + length][: len(branch)] == branch
            for at in range(len(tokens) - size)
        )
    assert len({tuple(branch) for _, branch in found}) == len(found)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60))
def test_growing_in_pieces_equals_growing_at_once(tokens: list[int], cut: int) -> None:
    whole, pieces = NgramIndex(), NgramIndex()
    whole.extend(tokens)
    pieces.extend(tokens[:cut])
    pieces.extend(tokens[cut:])
    assert whole.continuations(4, 5) == pieces.continuations(4, 5)


def test_a_repeated_passage_is_found_whole() -> None:
    passage = list(range(10, 30))
    index = NgramIndex()
    index.extend([1, 2, *passage, 3, *passage[:5]])
    size, branch = index.continuations(1, 8)[0]
    assert (size, branch) == (MAX_SUFFIX, passage[5:13])


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
