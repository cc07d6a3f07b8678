# SPDX-License-Identifier: Apache-2.0
"""The walk emits exact target samples, one per visited node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vllm_specplug.accept import walk_trees
from vllm_specplug.tree import DraftTree


@st.composite
def trees(draw: st.DrawFn, vocab: int = 4) -> DraftTree:
    """Random trees without repeated siblings."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(-1, len(tokens) - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [t for t in range(vocab) if t not in taken]
        if free:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
            depths.append(1 if parent < 0 else depths[parent] + 1)
    return DraftTree(
        np.array(tokens, dtype=np.int64),
        np.array(parents, dtype=np.int32),
        np.array(depths, dtype=np.int32),
        np.zeros(len(tokens), dtype=np.float32),
    )


@given(st.lists(trees(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_walk_follows_samples_and_stops_at_the_first_miss(batch: list[DraftTree], rng) -> None:
    roots = np.cumsum([0] + [t.num_nodes + 1 for t in batch])[:-1].tolist()
    table = [rng.randrange(4) for _ in range(sum(t.num_nodes + 1 for t in batch))]
    asked: Counter[int] = Counter()

    def sample(rows: list[int], live: list[bool]) -> Sequence[int]:
        asked.update(row for row, alive in zip(rows, live, strict=True) if alive)
        return [table[row] for row in rows]

    result = walk_trees(batch, roots, sample)
    for tree, root, tokens, path in zip(
        batch, roots, result.token_ids, result.accepted_paths, strict=True
    ):
        assert len(tokens) == len(path) + 1
        node = -1
        for token, accepted in zip(tokens, path, strict=False):
            assert token == table[root + 1 + node]
            assert int(tree.parent_indices[accepted]) == node
            assert int(tree.token_ids[accepted]) == token
            node = accepted
        assert tokens[-1] == table[root + 1 + node]
        assert tree.child_of(node, tokens[-1]) is None
    assert max(asked.values()) == 1, "a node was sampled more than once"


def test_none_is_a_request_without_drafts() -> None:
    result = walk_trees([None, DraftTree.chain([5])], [0, 1], lambda rows, live: [5, 5])
    assert result.token_ids == [[5], [5, 5]]
    assert result.accepted_paths == [[], [0]]


def _emitted_pairs(trials: int, biased: bool) -> Counter[tuple[int, int]]:
    """Two tokens per trial from fixed p(a), p(b|a) through one fixed tree."""
    rng = np.random.default_rng(0)
    p_first, p_second = _target()
    tree = DraftTree(
        np.array([2, 0, 2, 1], dtype=np.int64),
        np.array([-1, -1, 0, 0], dtype=np.int32),
        np.array([1, 1, 2, 2], dtype=np.int32),
        np.zeros(4, dtype=np.float32),
    )
    pairs: Counter[tuple[int, int]] = Counter()
    for _ in range(trials):

        def sample(rows: list[int], live: list[bool]) -> list[int]:
            row = rows[0]
            p = p_first if row == 0 else p_second[int(tree.token_ids[row - 1])]
            token = int(rng.choice(4, p=p))
            if biased and tree.child_of(row - 1, token) is None:
                token = int(rng.choice(4, p=p))
            return [token]

        tokens = walk_trees([tree], [0], sample).token_ids[0]
        if len(tokens) == 1:  # the next step samples the second token plainly
            tokens.append(int(rng.choice(4, p=p_second[tokens[0]])))
        pairs[(tokens[0], tokens[1])] += 1
    return pairs


def _target() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4), size=4)


@pytest.mark.parametrize("biased", [False, True])
def test_joint_distribution_of_two_tokens(biased: bool) -> None:
    trials = 20_000
    p_first, p_second = _target()
    pairs = _emitted_pairs(trials, biased)
    cells = [(a, b) for a in range(4) for b in range(4)]
    expected = [trials * p_first[a] * p_second[a, b] for a, b in cells]
    p_value = stats.chisquare([pairs[c] for c in cells], expected).pvalue
    if biased:
        assert p_value < 1e-6, "the test cannot see a biased accept rule"
    else:
        assert p_value > 1e-3


def test_a_token_that_ends_its_request_is_the_last_one() -> None:
    """Though a child holds it and has children of its own."""
    chain = DraftTree.chain([3, 1, 2])
    samples = {0: 3, 1: 1, 2: 2, 3: 0, 4: 3, 5: 1, 6: 2, 7: 0}
    asked: list[list[int]] = []

    def sample(rows: list[int], live: list[bool]) -> Sequence[int]:
        asked.append([row for row, alive in zip(rows, live, strict=True) if alive])
        return [samples[row] for row in rows]

    result = walk_trees(
        [chain, chain], [0, 4], sample, ends_request=lambda i, token: i == 0 and token == 1
    )
    assert result.token_ids == [[3, 1], [3, 1, 2, 0]]
    assert result.accepted_paths == [[0], [0, 1, 2]]
    # No sample after the end, so no random state moves on.
    assert asked == [[0, 4], [1, 5], [6], [7]]
