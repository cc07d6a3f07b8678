# SPDX-License-Identifier: Apache-2.0
"""What the device does with a step's trees, in Triton's interpreter, against the tensor code."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.step_trees import Drafted, UseKernels, compared, switch

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_specplug.tree.step_trees import (
    NO_NODE,
    attach_trees,
    committed_rows,
    set_positions,
    walk_trees,
)
from vllm_specplug.vllm_v2.graph_trees import GraphTrees
from vllm_specplug.vllm_v2.step_input import step_rows
from vllm_specplug.vllm_v2.stop_tokens import StopTokens
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits

pytestmark = pytest.mark.usefixtures("interpreter")

CPU = torch.device("cpu")
SIZES = (1, 15, 63, 256)


def compare_walks(use: UseKernels, nodes: int, seed: int) -> int:
    """Walks, and what they commit; returns the longest."""
    use(False)
    drafted = Drafted.draw(nodes, seed)
    trees, tokens, batch = drafted.step()
    rng = torch.Generator().manual_seed(seed)
    samples = torch.randint(0, 6, (len(tokens),), generator=rng)
    follows = torch.rand(len(tokens), generator=rng) < (1.0 if seed % 2 == 0 else 0.9)
    for row, parent in enumerate(trees.parent_rows.tolist()):
        if parent >= 0 and follows[row]:
            samples[parent] = tokens[row]
    trees = trees.without(torch.rand(len(tokens), generator=rng) < 0.05 * (seed % 2))
    stops = StopTokens(7, CPU)
    if seed % 4 == 3:
        stops.put(drafted.slots, [{seed % 6, 500}] * batch.num_reqs)
    total = batch.num_tokens
    # Lines of larger tables.
    slots = torch.randint(0, 10**6, (2, total), generator=rng)[1]
    positions = torch.randint(0, 10**6, (total + 5,), generator=rng)[:total]

    def walked() -> list[torch.Tensor]:
        walk = walk_trees(stops.mask_after_stop(trees, tokens), samples, tokens)
        return [*astuple(walk), *astuple(committed_rows(trees, walk, slots, positions))]

    _, _, lengths, *_ = compared(use, walked)
    return int(lengths.max())


def compare_puts(use: UseKernels, nodes: int, seed: int) -> tuple[int, int]:
    """Trees that are kept; returns the greatest depth, and the nodes that no walk may reach."""
    drafted = Drafted.draw(nodes, seed)
    if seed % 4 == 1:
        # Rows of a wider table, and the types of trees that the host has built.
        wide = torch.cat([drafted.parents, drafted.tokens.int(), drafted.parents], dim=1)
        drafted.parents = wide[:, :nodes]
        drafted.counts, drafted.slots = drafted.counts.long(), drafted.slots.int()
    if seed % 3 == 1:
        drafted.room = torch.randint(0, nodes + 2, drafted.counts.shape, dtype=torch.int32)

    def kept() -> tuple[torch.Tensor, ...]:
        store, ids = drafted.put()
        return ids, store.parents, store.depths, store.scores, store.root_positions

    _, parents, depths, *_ = compared(use, kept)
    lost = parents[drafted.slots.long()] == NO_NODE
    return int(depths.max()), int(lost.sum())


def compare_steps(use: UseKernels, nodes: int, seed: int) -> int:
    """Trees attached, placed, and arranged for graphs of more requests and rows, also without
    drafts; returns how many nodes a walk may reach."""
    use(False)
    drafted = Drafted.draw(nodes, seed)
    (store, _), (_, _, batch) = drafted.put(), drafted.step()
    places, num_rows = batch.num_reqs + seed % 4, batch.num_tokens + seed % 5
    lengths = np.array(drafted.prompts) + drafted.scheduled + 1
    starts = torch.full((places + 1,), batch.num_tokens, dtype=torch.int32)
    starts[: batch.num_reqs + 1] = torch.tensor([0, *np.cumsum(lengths)])
    seq_lens = torch.zeros(places, dtype=torch.int32)
    # In a capture they may be shorter than the rows.
    seq_lens[: batch.num_reqs] = batch.seq_lens if seed % 5 else 1
    table = torch.zeros((1, 1), dtype=torch.int32)

    def attached() -> list[torch.Tensor]:
        trees = attach_trees(store, step_rows(batch, nodes))
        positions = torch.arange(num_rows) * 7
        set_positions(trees, positions)
        fields = [trees.parent_rows, trees.depths, trees.above, positions]
        graph = GraphTrees(StepLimits(9, num_rows, nodes + 1, 900), CPU)
        for given in (trees, None):
            filled = graph.fill(given, starts, seq_lens, table, num_rows, None)
            # Rows of padding hold anything.
            parents = filled.parent_rows[: batch.num_tokens].clone()
            fields += [filled.plan.clone(), filled.query_starts.clone(), parents]
        return fields

    parent_rows, *_ = compared(use, attached)
    return int((parent_rows >= 0).sum())


@pytest.fixture(params=SIZES)
def cases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the comparisons above."""
    use = switch(monkeypatch)
    return [(use, request.param, seed) for seed in range(20 if request.param < 256 else 8)]


def test_walks_and_what_they_commit(cases: list[Any]) -> None:
    assert max(compare_walks(*case) for case in cases) == cases[0][1]


def test_trees_that_are_kept(cases: list[Any]) -> None:
    depths, lost = zip(*(compare_puts(*case) for case in cases), strict=True)
    assert max(depths) == cases[0][1] < sum(lost)


def test_trees_of_a_step(cases: list[Any]) -> None:
    assert sum(compare_steps(*case) for case in cases) > 10
