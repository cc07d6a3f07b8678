# SPDX-License-Identifier: Apache-2.0
"""Tables of a step in Triton's interpreter, against the tensor code."""

from __future__ import annotations

from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.step_trees import SLOTS, UseKernels, compared, numbers, request_states, switch

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_specplug.drafting.device_requests import DeviceTrees
from vllm_specplug.tree.step_trees import Walk
from vllm_specplug.vllm_v2.draft_inputs import draft_inputs
from vllm_specplug.vllm_v2.host_step import step_table, trees_table

pytestmark = pytest.mark.usefixtures("interpreter")

# Less and more than one block of columns.
SIZES = (1, 16, 300)


def compare_step_tables(use: UseKernels, width: int, seed: int) -> int:
    """What the host learns of a step; returns how many requests are shorter than a step may be."""
    rng = np.random.default_rng(seed)
    num_reqs = seed % 5
    states = request_states(rng, 3 * width)
    slots = torch.from_numpy(rng.permutation(SLOTS)[:num_reqs])
    wide = torch.int64 if seed % 3 == 1 else torch.int32
    # Lengths of padded batches go on.
    batch = SimpleNamespace(idx_mapping=slots, seq_lens=numbers(rng, num_reqs + seed % 4))
    walk = None
    if seed % 2:
        paths = numbers(rng, num_reqs, width, dtype=torch.int64)
        walk = Walk(paths, paths, numbers(rng, num_reqs, dtype=wide))
    sampled = torch.from_numpy(rng.integers(0, 3, num_reqs)).to(wide)
    (table,) = compared(use, lambda: [step_table(states, batch, walk, sampled, width)])
    assert table.shape == (num_reqs, 4 + width + (1 + width) * (walk is not None))
    return int((states.total_len.gpu[slots] < width).sum())


def device_trees(rng: np.random.Generator, num_reqs: int, nodes: int, strided: bool) -> DeviceTrees:
    """Trees of anything, in rows of a wider table or not."""
    width = nodes + 3 * strided
    token_ids = numbers(rng, num_reqs, width, dtype=torch.int64)[:, :nodes]
    parents, depths = (numbers(rng, num_reqs, width)[:, :nodes] - 2 for _ in range(2))
    # Any bits, which are those of numbers that are none as well.
    bits = numbers(rng, num_reqs, width)[:, :nodes]
    bits[:, ::3] = -1
    if strided:
        parents, depths = torch.cat([parents, depths], dim=1).split(nodes, dim=1)
    counts = numbers(rng, num_reqs, 1 + strided)[:, 0]
    return DeviceTrees(token_ids, parents, depths, bits.view(torch.float32), counts)


def compare_trees_tables(use: UseKernels, nodes: int, seed: int) -> None:
    """What the host learns of trees, with and without branches and trees of these alone."""
    rng = np.random.default_rng(seed)
    num_reqs = seed % 5
    trees = device_trees(rng, num_reqs, nodes, strided=seed % 3 == 2)
    room = numbers(rng, num_reqs, 1 + seed % 2)[:, 0]
    alone, found = None, None
    if seed % 4 > 1:
        shape = num_reqs, *rng.integers(1, 5, 2).tolist()
        found = numbers(rng, *shape[:2]), numbers(rng, *shape) - 1
    if seed % 4 == 3:
        alone = device_trees(rng, num_reqs, nodes, strided=False)
    compared(use, lambda: [trees_table(trees, room, alone, found)])


def compare_draft_inputs(use: UseKernels, num_reqs: int, seed: int) -> tuple[int, int, int]:
    """What drafts begin with; returns how many requests have a budget, how many prompts go on, and
    how many requests are too near their end."""
    rng = np.random.default_rng(seed)
    states = request_states(rng, 90)
    slots = torch.from_numpy(rng.integers(0, SLOTS, num_reqs))
    sampled = torch.from_numpy(rng.integers(0, 3, num_reqs)).int()
    most, room, forward = rng.integers(0, 20, (3, num_reqs))
    longest = states.total_len.gpu[slots].numpy() + rng.integers(0, 30, num_reqs)
    limits = torch.from_numpy(np.stack([most, longest, room, forward])).int()
    made = compared(use, lambda: astuple(draft_inputs(states, slots, sampled, limits)))
    _, _, budgets, depths, _, _, roots = made
    return int((budgets > 0).sum()), int((roots < 0).sum()), int((depths < 1).sum())


@pytest.fixture(params=SIZES)
def cases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the comparisons above."""
    use = switch(monkeypatch)
    return [(use, request.param, seed) for seed in range(30)]


def test_what_the_host_learns_of_a_step(cases: list[Any]) -> None:
    short = sum(compare_step_tables(*case) for case in cases)
    assert short > 5 or cases[0][1] == 1


def test_what_the_host_learns_of_trees(cases: list[Any]) -> None:
    for case in cases:
        compare_trees_tables(*case)


# The last take more than one program.
@pytest.mark.parametrize("num_reqs", [0, 1, 4, 7, 129, 300])
def test_what_drafts_begin_with(num_reqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use = switch(monkeypatch)
    seen = np.sum([compare_draft_inputs(use, num_reqs, seed) for seed in range(30)], axis=0)
    assert all(seen > 0) or not num_reqs
