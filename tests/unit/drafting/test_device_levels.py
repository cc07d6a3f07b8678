# SPDX-License-Identifier: Apache-2.0
"""Levels of a device against those of the host, node for node."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.drafting.device_levels import (
    DeviceFrontier,
    draft_levels_on_device,
    read_trees,
)
from vllm_specplug.tree import ROOT, DraftTree
from vllm_specplug.tree.beam import Frontier, draft_level_by_level

VOCAB = 5


class Branches:
    """Candidates that depend on the whole branch, with many ties and rows that end early."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.calls = 0

    def of(self, request: int, path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, request, *path])
        scores = -np.sort(rng.integers(0, 5, VOCAB) / 2.0).astype(np.float32)
        if rng.random() < 0.3:
            scores[rng.integers(0, VOCAB) :] = rng.choice([-np.inf, np.nan])
        if rng.random() < 0.2:
            scores[0] = 1e-3  # rounding
        return rng.permutation(VOCAB), scores


class OnHost(Branches):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.paths: dict[tuple[int, int], tuple[int, ...]] = {}

    def __call__(self, frontier: Frontier) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for r, node, parent, token in zip(
            frontier.requests.tolist(), frontier.nodes.tolist(), frontier.parents.tolist(),
            frontier.token_ids.tolist(), strict=True,
        ):  # fmt: skip
            path = () if node == ROOT else (*self.paths.get((r, parent), ()), token)
            self.paths[r, node] = path
            found.append(self.of(r, path))
        ids, scores = zip(*found, strict=True)
        return np.stack(ids), np.stack(scores)


class OnDevice(Branches):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.paths: list[list[tuple[int, ...]]] = []
        self.widest = 0

    def __call__(self, frontier: DeviceFrontier) -> tuple[torch.Tensor, torch.Tensor]:
        count, places = frontier.token_ids.shape
        self.widest = max(self.widest, places)
        paths: list[list[tuple[int, ...]]] = []
        ids, scores = [], []
        for r in range(count):
            line = []
            for token, parent in zip(
                frontier.token_ids[r].tolist(), frontier.parents[r].tolist(), strict=True
            ):
                line.append((*self.paths[r][parent], token) if frontier.depth else ())
            paths.append(line)
            found = [self.of(r, path) for path in line]
            ids.append(np.stack([a for a, _ in found]))
            scores.append(np.stack([b for _, b in found]))
        self.paths = paths
        self.calls += 1
        return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(scores))


def same(ours: DraftTree, theirs: DraftTree) -> None:
    ours.validate()
    for name in ("token_ids", "parent_indices", "depths", "scores"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name


@given(
    st.integers(0, 10**6),
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 5)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, VOCAB),
    st.sampled_from([None, 1, 3, 16]),
)
def test_trees_of_a_device_are_those_of_the_host(
    seed: int,
    requests: list[tuple[int, int]],
    width: int,
    frontier_width: int | None,
) -> None:
    budgets, depths = (list(column) for column in zip(*requests, strict=True))
    anchors = list(range(len(requests)))
    expected = draft_level_by_level(
        anchors, budgets, depths, width, OnHost(seed), frontier_width=frontier_width
    )
    made = draft_levels_on_device(
        torch.tensor(anchors),
        torch.tensor(budgets, dtype=torch.int32),
        torch.tensor(depths, dtype=torch.int32),
        OnDevice(seed),
        num_levels=max(depths),
        num_nodes=12,
        width=width,
        frontier_width=frontier_width,
    )
    assert made.token_ids.shape == (len(requests), 12)
    for ours, theirs in zip(read_trees(made), expected, strict=True):
        same(ours, theirs)


@pytest.mark.parametrize(("frontier_width", "widest"), [(None, 12), (3, 3)])
def test_a_frontier_has_its_places_and_no_more(frontier_width: int | None, widest: int) -> None:
    expand = OnDevice(0)
    five = torch.tensor([5])
    draft_levels_on_device(
        torch.tensor([0]), 2 * five, five, expand,
        num_levels=5, num_nodes=12, width=VOCAB, frontier_width=frontier_width,
    )  # fmt: skip
    assert expand.calls == 5 and expand.widest == widest
