# SPDX-License-Identifier: Apache-2.0
"""Graphs of forwards: what was captured for a number of rows and of requests serves every ragged
step that fits. Replays of pretended graphs, over memory that is overwritten between steps, against
the same operations without a graph; Triton runs in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.kernels.graph_memory import (
    BLOCKS,
    CONTEXT,
    CPU,
    DIM,
    HEADS,
    KV_HEADS,
    NODES,
    PAGE,
    REQUESTS,
    VOCAB,
    config,
    garbage,
)
from tests.kernels.tree_problem import random_parents
from tests.pretended_graph import CaptureError, PretendedGraph, capturing
from tests.unit.vllm_v2.steps import input_batch

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel, load_kernel
from vllm_specplug.tree.step_trees import StepTrees, TreeStore, attach_trees, set_positions
from vllm_specplug.vllm_attention.gpu import gpu_cache_views
from vllm_specplug.vllm_v2 import graph_trees
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_v2.graph_trees import GraphTrees, wrap_graph_manager
from vllm_specplug.vllm_v2.step_input import step_rows
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits

pytestmark = pytest.mark.usefixtures("interpreter")

SIZES = [1, 3, 8, 17, REQUESTS * (NODES + 1)]


@pytest.fixture(autouse=True)
def full_graphs(pretended_pool: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "1")


class Target:
    """Two layers of attention over pages, with the buffers of vLLM's runner."""

    def __init__(self, sizes: list[int] = SIZES) -> None:
        torch.manual_seed(0)
        limits = StepLimits(REQUESTS, SIZES[-1], NODES + 1, CONTEXT)
        self.backend = CudaTreeBackend("auto", HEADS, limits, CPU)
        self.backend.kernel = ChosenKernel("triton", load_kernel("triton"), "")
        self.backend.views = gpu_cache_views
        pages = 1 + REQUESTS * BLOCKS
        self.caches = [torch.randn(pages, KV_HEADS, PAGE, 2 * DIM) for _ in range(2)]
        self.pages = 1 + torch.randperm(pages - 1).view(REQUESTS, BLOCKS).int()
        self.weights = [torch.randn(HEADS * DIM, HEADS * DIM) / 6 for _ in range(2)]
        self.embeddings = torch.randn(VOCAB, HEADS * DIM)
        self.input_ids = torch.zeros(SIZES[-1], dtype=torch.int32)
        self.positions = torch.zeros(SIZES[-1], dtype=torch.int64)
        self.query_start_loc = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(REQUESTS, dtype=torch.int32)
        self.table = torch.zeros_like(self.pages)
        self.output = torch.zeros(SIZES[-1], HEADS * DIM)
        self.store = TreeStore(7, NODES, VOCAB, CPU)
        manager = wrap_graph_manager(CudaGraphManager)
        self.manager = manager(config(sizes), CPU, CUDAGraphMode.FULL_AND_PIECEWISE, NODES + 1)

    def forward(self, rows: Any, count: int) -> torch.Tensor:
        x = self.embeddings[self.input_ids[:count].long()] + self.positions[:count, None] * 0.01
        for weight, cache in zip(self.weights, self.caches, strict=True):
            query = torch.nn.functional.linear(x, weight).view(count, HEADS, DIM)
            mixed = torch.empty_like(query)
            rows.attend(query, cache, mixed, DIM**-0.5, block_table=rows.metadata.block_table)
            x = x + mixed.flatten(1)
        return x

    def padded(self, desc: Any) -> Any:
        count, num_reqs = desc.num_tokens, desc.num_reqs
        return SimpleNamespace(
            max_query_len=desc.max_query_len,
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            num_tokens_after_padding=count,
        )

    def capture(self) -> None:
        def forward_of(desc: Any, warmup: bool) -> Callable[[Any], None]:
            count, places = desc.num_tokens, desc.num_reqs
            # As vLLM's dummies: equal shares, and lengths of 1 whatever they are.
            ends = torch.arange(places + 1) * count // places
            self.query_start_loc[: places + 1] = ends
            self.seq_lens.fill_(1)
            self.table.zero_()
            rows = self.backend.graph_rows(None, self.padded(desc), [self.table[:places]])

            def run(mode: Any) -> None:
                self.output[:count] = self.forward(rows, count)

            return run

        self.manager._capture_descs.pop(CUDAGraphMode.PIECEWISE)
        self.manager.capture(forward_of)

    def step(self, specs: list[tuple[int, int, int]], rng: Any) -> tuple[torch.Tensor, Any]:
        """Runs a step of (slot, context, drafts) from a graph; what its rows are without one, and
        which graph it was."""
        slots, contexts, drafts = (list(column) for column in zip(*specs, strict=True))
        batch = input_batch(slots, contexts, drafts)
        count, num_reqs = batch.num_tokens, len(specs)
        desc = self.manager.dispatch(num_reqs, count, None, 0, max_query_len=max(drafts) + 1)
        assert desc.cg_mode == CUDAGraphMode.FULL and desc.num_tokens >= count
        # Nothing that an earlier step left is of use, and padding holds anything legal.
        buffers = vars(self.backend.graph_trees)
        garbage(*(buffers[name] for name in ("plan", "starts", "parents", "words")), self.output)
        for cache in self.caches:
            cache[0] = float("nan")  # of nobody
        self.input_ids.random_(0, VOCAB)
        self.positions.random_(0, CONTEXT)
        lengths = np.array(drafts) + 1
        starts = np.full(REQUESTS + 1, count)
        starts[: num_reqs + 1] = np.concatenate([[0], np.cumsum(lengths)])
        self.query_start_loc.copy_(torch.from_numpy(starts))
        self.seq_lens.zero_()
        self.seq_lens[:num_reqs] = batch.seq_lens
        self.table.zero_()
        self.table[:num_reqs] = self.pages[[s % REQUESTS for s in slots]]
        batch.seq_lens = self.seq_lens[:num_reqs]
        trees = self.trees(batch, slots, contexts, drafts, rng)
        set_positions(trees, self.positions)
        # A step without drafts brings no trees.
        given = trees if any(drafts) else None
        batch.query_start_loc = self.query_start_loc[: desc.num_reqs + 1]
        batch.seq_lens = self.seq_lens[: desc.num_reqs]
        batch.num_tokens_after_padding = desc.num_tokens
        batch.max_query_len = desc.max_query_len
        self.backend.graph_rows(given, batch, [self.table[: desc.num_reqs]])
        self.manager.run_fullgraph(desc)
        eager = self.backend.tree_rows(trees, [self.table[:num_reqs]])
        assert eager.covers_batch
        return self.forward(eager, count), desc

    def trees(
        self, batch: Any, slots: list[int], contexts: list[int], drafts: list[int], rng: Any
    ) -> StepTrees:
        parents = torch.full((len(slots), NODES), -1, dtype=torch.int32)
        # Distinct siblings.
        ids = torch.arange(NODES).repeat(len(slots), 1)
        for line in parents:
            line.copy_(torch.from_numpy(random_parents(NODES, rng)))
        # One of them was drafted below another root: none of its nodes can be reached.
        roots = torch.tensor(contexts)
        roots[rng.integers(len(slots))] -= int(rng.integers(2))
        nodes = torch.tensor([int(rng.integers(NODES + 1)) for _ in drafts])
        self.store.put(torch.tensor(slots), roots, ids, parents, nodes, torch.zeros(ids.shape))
        return attach_trees(self.store, step_rows(batch, NODES))


def steps(rng: np.random.Generator, most: int) -> list[tuple[int, int, int]]:
    """One step of `most` rows at most: ragged, and some requests without drafts."""
    specs: list[tuple[int, int, int]] = []
    room = most
    for slot in rng.permutation(7)[: int(rng.integers(1, REQUESTS + 1))]:
        if room:
            drafts = int(rng.choice([0, rng.integers(NODES + 1), NODES]))
            drafts = min(drafts, room - 1)
            room -= drafts + 1
            context = int(rng.choice([0, 1, rng.integers(CONTEXT - NODES - 1)]))
            # Slots of one request's pages are of no other.
            if all(slot % REQUESTS != s % REQUESTS for s, *_ in specs):
                specs.append((int(slot), context, drafts))
    return specs


def test_every_ragged_step_of_every_size() -> None:
    target, rng = Target(), np.random.default_rng(0)
    target.capture()
    assert {desc.num_tokens for desc in target.manager.graphs} == set(SIZES)
    used, were_padded, without_drafts = set(), 0, 0
    for number in range(15):
        specs = steps(np.random.default_rng(number), SIZES[number % len(SIZES)])
        before = PretendedGraph.replays
        expected, desc = target.step(specs, rng)
        assert PretendedGraph.replays == before + 1
        assert torch.equal(target.output[: len(expected)], expected), (number, specs)
        assert not expected.isnan().any()
        used.add(desc.num_tokens)
        were_padded += desc.num_tokens > len(expected) and desc.num_reqs > len(specs)
        without_drafts += not any(drafts for *_, drafts in specs)
    assert used == set(SIZES) and were_padded > 1 and without_drafts > 1


def test_what_a_graph_does_not_see_is_noticed() -> None:
    target, rng = Target([17]), np.random.default_rng(0)
    target.capture()
    fill, parents = GraphTrees.fill, graph_trees.row_parents

    def stale_padding(self: Any, trees: Any, starts: Any, lens: Any, *rest: Any) -> Any:
        """Padding requests get the first request's rows instead of none."""
        made = fill(self, trees, starts, lens, *rest)
        made.plan[1:, made.plan[2] == 0] = made.plan[1:, :1]
        return made

    controls = {
        "none": nullcontext(),
        "another memory": patch.object(
            target.backend, "graph_trees", GraphTrees(target.backend.limits, CPU)
        ),
        "stale padding": patch.object(GraphTrees, "fill", stale_padding),
        "chains": patch.object(
            graph_trees, "row_parents", lambda trees, *rest: parents(None, *rest)
        ),
    }
    for name, control in controls.items():
        with control:
            expected, _ = target.step([(0, 9, 6), (1, 30, 4), (2, 5, 1)], rng)
        is_seen = torch.equal(target.output[: len(expected)], expected)
        assert is_seen == (name == "none"), name


@pytest.mark.parametrize("bound", ["rows", "context"])
def test_bounds_of_the_captured_step_are_not_those_of_the_replayed(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch grid for few rows serves no larger tree; a context is never cut."""
    target, rng = Target([17]), np.random.default_rng(0)
    with monkeypatch.context() as patched:
        if bound == "context":
            limits = replace(target.backend.limits, context=1)
            patched.setattr(target.backend.graph_trees, "limits", limits)
        else:
            padded = target.padded
            patched.setattr(target, "padded", lambda desc: padded(replace(desc, max_query_len=1)))
        target.capture()
    expected, _ = target.step([(0, 9, NODES), (1, 60, 4)], rng)
    assert torch.equal(target.output[: len(expected)], expected) == (bound == "context")


# -- what a capture may not do -------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t[0].item(),
        lambda t: bool((t > 0).any()),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.repeat_interleave(t, t),
        lambda t: t + torch.tensor([1, 2, 3]),
        lambda t: t + torch.from_numpy(np.ones(3)),
    ],
)
def test_reads_and_values_of_the_host_are_errors(call: Callable[[torch.Tensor], Any]) -> None:
    values = torch.ones(3, dtype=torch.int64)
    with pytest.raises(CaptureError), capturing(PretendedGraph()):
        call(values)


def test_a_graph_repeats_what_was_captured() -> None:
    x, y, graph = torch.ones(3), torch.zeros(3), PretendedGraph()
    with capturing(graph):
        kept = (x * 2).sum(0, keepdim=True)
        y.copy_(kept.expand(3) + x)
    x.fill_(5.0)
    graph.replay()
    assert y.tolist() == [35.0] * 3 and kept.tolist() == [30.0]
    # Memory of a pool is another graph's next.
    PretendedGraph().replay()
    assert kept.isnan().all()
