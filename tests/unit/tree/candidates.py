# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for the per-depth candidates of trees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from vllm_specplug.tree import DraftTree, build_tree


@dataclass(frozen=True)
class Case:
    """Arguments of one `build_tree` call."""

    token_ids: np.ndarray  # [D, K]
    log_probs: np.ndarray  # [D, K]
    budget: int
    tree_width: int
    tree_depth: int

    def build(self, budget: int | None = None) -> DraftTree:
        return build_tree(
            self.token_ids,
            self.log_probs,
            self.budget if budget is None else budget,
            tree_width=self.tree_width,
            tree_depth=self.tree_depth,
        )


@st.composite
def cases(draw: st.DrawFn, max_depth: int = 5, max_k: int = 5, max_budget: int = 40) -> Case:
    depth = draw(st.integers(1, max_depth))
    k = draw(st.integers(1, max_k))
    # Quarters of a nat are exact in float32 and make ties frequent; the free floats make none.
    logp = draw(
        st.sampled_from(
            [
                st.integers(-32, 0).map(lambda n: n / 4),
                st.floats(-12.0, 0.0, width=32),
            ]
        )
    )
    log_probs = [sorted(draw(st.lists(logp, min_size=k, max_size=k)))[::-1] for _ in range(depth)]
    token_ids = [draw(st.permutations(range(7)).map(lambda p: p[:k])) for _ in range(depth)]
    return Case(
        token_ids=np.array(token_ids, dtype=np.int64),
        log_probs=np.array(log_probs, dtype=np.float32),
        budget=draw(st.integers(0, max_budget)),
        tree_width=draw(st.integers(1, max_k + 1)),
        tree_depth=draw(st.integers(1, max_depth + 1)),
    )


def _hard_row(draw: st.DrawFn, k: int) -> list[float]:
    """[k] log-probabilities that rounding, masks or a broken head leave, likeliest first."""
    tail = draw(st.sampled_from([1e-3, 1e-6, 1e-7, 1e-12]))
    confident = [math.log1p(-tail)] + [math.log(tail / k)] * (k - 1)
    row = draw(
        st.sampled_from(
            [
                confident,
                [0.0] * k,
                # Above 1 by rounding.
                [2.4e-7, 1.2e-7] + [-16.0] * k,
                [0.0] + [-math.inf] * (k - 1),
                [-math.inf] * k,
                [math.nan] * k,
                [math.inf] + [-1.0] * (k - 1),
                [-1e-45, -1e-40, -1e-38] + [-3e38] * k,
                [-0.5] * k,
                [-3.4e38] * k,
            ]
        )
    )[:k]
    if draw(st.booleans()):
        row[draw(st.integers(0, k - 1))] = draw(st.sampled_from([math.nan, -math.inf]))
    return row


@st.composite
def hard_cases(draw: st.DrawFn, max_depth: int = 4, max_k: int = 4) -> Case:
    """Candidates that no sane head gives. Depths share tokens, siblings do not."""
    depth, k = draw(st.integers(1, max_depth)), draw(st.integers(1, max_k))
    log_probs = [_hard_row(draw, k) for _ in range(depth)]
    token_ids = [draw(st.permutations(range(k))) for _ in range(depth)]
    return Case(
        token_ids=np.array(token_ids, dtype=np.int64),
        log_probs=np.array(log_probs, dtype=np.float32),
        budget=draw(st.sampled_from([0, 1, 2, 7, 64, 1000])),
        tree_width=draw(st.sampled_from([1, 2, max_k, 100])),
        tree_depth=draw(st.sampled_from([0, 1, 2, 100])),
    )


def usable(case: Case) -> list[list[tuple[int, float]]]:
    """Of each depth the candidates that may be drafted and their log-probabilities."""
    rows = []
    for tokens, logps in zip(case.token_ids.tolist(), case.log_probs.tolist(), strict=True):
        row = []
        for token, logp in zip(tokens[: case.tree_width], logps, strict=False):
            if logp != logp or logp in (math.inf, -math.inf):
                break
            row.append((token, min(logp, 0.0)))
        rows.append(row)
    return rows[: case.tree_depth]


def all_paths(rows: list[list[tuple[int, float]]]) -> dict[tuple[int, ...], float]:
    """Every path through the candidates and its score."""
    level: dict[tuple[int, ...], float] = {(): 0.0}
    paths: dict[tuple[int, ...], float] = {}
    for row in rows:
        level = {(*p, token): s + logp for p, s in level.items() for token, logp in row}
        paths.update(level)
    return paths


def checked_paths(
    token_ids: Sequence[int],
    parents: Sequence[int],
    depths: Sequence[int],
    scores: Sequence[float],
) -> dict[tuple[int, ...], float]:
    """The tree's paths and scores; fails where the arrays are no tree."""
    paths: list[tuple[int, ...]] = []
    for node, (token, parent, depth, score) in enumerate(
        zip(token_ids, parents, depths, scores, strict=True)
    ):
        assert -1 <= parent < node
        path = (*(paths[parent] if parent >= 0 else ()), token)
        assert path not in paths and len(path) == depth
        assert score <= (scores[parent] if parent >= 0 else 0.0)
        paths.append(path)
    return dict(zip(paths, scores, strict=True))


def tree_of(
    token_ids: Sequence[int], parents: Sequence[int], scores: Sequence[float] | float = 0.0
) -> DraftTree:
    """The tree with these columns; depths follow from parents."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    scores = np.full(len(depths), scores) if isinstance(scores, float) else scores
    types = (np.int64, np.int32, np.int32, np.float32)
    columns = zip((token_ids, parents, depths, scores), types, strict=True)
    return DraftTree(*(np.array(values, dtype) for values, dtype in columns))


@st.composite
def trees(
    draw: st.DrawFn, most: int, vocab: int, drops: Sequence[float] = (0.0,), near: int = 1 << 30
) -> DraftTree:
    """Random trees without repeated siblings. A node scores one of `drops` less than its parent,
    which is one of the `near` last nodes, so that small numbers make deep trees."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.integers(max(-1, len(tokens) - near), len(tokens) - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        if free := [t for t in range(vocab) if t not in taken]:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
            above = scores[parent] if parent >= 0 else 0.0
            scores.append(above - (draw(st.sampled_from(drops)) if len(drops) > 1 else drops[0]))
    return tree_of(tokens, parents, scores)


def columns_of(tree: DraftTree) -> tuple[list, list, list, list]:
    """What `checked_paths` takes."""
    return (
        tree.token_ids.tolist(), tree.parent_indices.tolist(), tree.depths.tolist(),
        tree.scores.tolist(),
    )  # fmt: skip


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The tokens that lead to each node, and its score."""
    return checked_paths(*columns_of(tree))


def assert_best(
    paths: dict[tuple[int, ...], float], every: dict[tuple[int, ...], float], budget: int
) -> None:
    """`paths` are the `budget` best of `every`, in falling order, each with its own score."""
    assert len(paths) == min(budget, len(every))
    assert list(paths.values()) == sorted(paths.values(), reverse=True)
    with np.errstate(over="ignore"):
        wanted = {path: float(np.float32(score)) for path, score in every.items()}
    assert all(wanted[path] == score for path, score in paths.items())
    assert list(paths.values()) == sorted(wanted.values(), reverse=True)[: len(paths)]
