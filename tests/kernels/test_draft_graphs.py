# SPDX-License-Identifier: Apache-2.0
"""Drafts from graphs against the same drafts without one: of all requests, of some, and of
every depth, over memory that is overwritten between steps; Triton runs in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.e2e.assistants import WINDOW, make_assistant
from tests.e2e.mimo import make_mimo_target
from tests.e2e.tiny import (
    HIDDEN,
    make_dflash2_head,
    make_dspark_head,
    make_eagle3_head,
    make_head,
    make_local_head,
)
from tests.kernels.bound_backend import triton_backend
from tests.kernels.graph_memory import (
    BLOCKS,
    CONTEXT,
    CPU,
    NODES,
    PAGE,
    REQUESTS,
    VOCAB,
    config,
    garbage,
    same_trees,
)
from tests.pretended_graph import PretendedGraph
from tests.unit.drafters import load_drafter

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.methods.assistant_tree.drafter import AssistantDrafter
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.methods.dels.drafter import DelsDrafter
from vllm_specplug.methods.dels.resolve import DelsSettings
from vllm_specplug.methods.dflash2_tree.drafter import DFlash2Drafter
from vllm_specplug.methods.dspark_tree.drafter import DSparkDrafter
from vllm_specplug.methods.eagle3_tree.drafter import Eagle3Drafter, ParallelDrafter
from vllm_specplug.methods.local.settings import LocalTreeSettings
from vllm_specplug.methods.mtp_tree.drafter import MtpDrafter
from vllm_specplug.vllm_v2.context_graphs import ContextGraphs
from vllm_specplug.vllm_v2.draft_graphs import DraftGraphs, graph_depths
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.runner_view import RunnerView

pytestmark = pytest.mark.usefixtures("interpreter", "pretended_pool")

DEPTH = 4
SIZES = [1, 2, REQUESTS]
TARGET = SimpleNamespace(
    hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=2, sliding_window=WINDOW
)

# drafter, head and settings
Made = tuple[Callable[..., Any], Path, Any]


def causal_head(folder: Path) -> Made:
    return BlockHeadDrafter, make_head(folder, VOCAB), None


def bidirectional_head(folder: Path) -> Made:
    return BlockHeadDrafter, make_head(folder, VOCAB, causal=False), None


def markov_head(folder: Path, kind: str = "vanilla") -> Made:
    settings = LocalTreeSettings.of_own_head(DEPTH, 16, 2 if kind == "domino" else 1)
    return DSparkDrafter, make_dspark_head(folder, VOCAB, kind=kind, windows=(None,)), settings


def selector(folder: Path) -> Made:
    settings = LocalTreeSettings.of_own_head(DEPTH, 12)
    return DFlash2Drafter, make_dflash2_head(folder, VOCAB, windows=(24, None)), settings


def local_head(folder: Path) -> Made:
    local, weights = make_local_head(folder / "local", VOCAB), (0.0, 0.5, 0.5, 0.5)
    settings = DelsSettings(
        path=str(local / "model.safetensors"), alpha=weights, beta=weights,
        unigram_path=str(local / "unigram.safetensors"), num_candidates=16,
    )  # fmt: skip
    return DelsDrafter, make_head(folder / "head", VOCAB, causal=False), settings


def draft_layer(folder: Path) -> Made:
    return Eagle3Drafter, make_eagle3_head(folder, VOCAB, draft_vocab_size=20), None


def several_layers(folder: Path) -> Made:
    return Eagle3Drafter, make_eagle3_head(folder, VOCAB, windows=(None, 24)), None


def parallel_head(folder: Path) -> Made:
    windows = (24, None)
    head = make_eagle3_head(folder, VOCAB, windows=windows, mask_token_id=2)
    return ParallelDrafter, head, None


def module_of_the_target(folder: Path) -> Made:
    return MtpDrafter, make_mimo_target(folder, VOCAB), None


def assistant(folder: Path) -> Made:
    make_assistant(folder, VOCAB, grouped=True)
    return AssistantDrafter, folder, None


HEADS: list[Any] = [
    causal_head,
    markov_head,
    *(
        pytest.param(make, marks=pytest.mark.full)
        for make in (
            bidirectional_head,
            several_layers,
            *(partial(markov_head, kind=kind) for kind in ("domino", "gated", "rnn")),
        )
    ),
    selector,
    local_head,
    draft_layer,
    parallel_head,
    module_of_the_target,
    assistant,
]


def store(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As vLLM's kernel, but for slots of -1: those go to page 0, which nobody reads."""
    slots = slots.clamp_min(0)
    cache[slots // PAGE, :, slots % PAGE] = torch.cat((key, value), dim=-1)


class Drafts:
    """A head over pages, with its graphs."""

    def __init__(
        self,
        make: Callable[[Path], Made],
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        sizes: list[int] = SIZES,
    ) -> None:
        torch.manual_seed(1)
        cls, head, settings = make(folder / "head")
        self.drafter = load_drafter(
            cls, head, settings, torch.randn(VOCAB, HIDDEN), text_config=TARGET, num_nodes=NODES,
            max_depth=NODES, tree_width=3, max_model_len=CONTEXT,
        )  # fmt: skip
        specs, read = self.drafter.cache_specs(), self.drafter.target_cache_specs()
        pages = 1 + REQUESTS * BLOCKS
        layers: Any = [
            SimpleNamespace(
                kv_cache=torch.randn(pages, s.num_kv_heads, PAGE, 2 * s.head_dim), spec=s
            )
            for s in (*specs, *read)
        ]
        for layer in layers:
            layer.kv_cache[0] = float("nan")
        self.table = torch.zeros(REQUESTS, BLOCKS, dtype=torch.int32)
        self.pages = 1 + torch.randperm(pages - 1).view(REQUESTS, BLOCKS).int()
        limits = StepLimits(REQUESTS, 64, NODES + 1, CONTEXT)
        backend = triton_backend(4, limits, monkeypatch)
        backend.block_size = PAGE
        self.caches: list[torch.Tensor] = [layer.kv_cache for layer in layers]
        if specs:
            cache = backend.draft_cache(layers, lambda: self.table, specs[0].head_dim ** -0.5)
            self.drafter.bind_cache(cache)
        if read:
            made = {
                layer.spec: backend.target_cache(layer.kv_cache, lambda: self.table, layer.spec)
                for layer in layers
            }
            self.drafter.bind_target_caches([made[spec] for spec in read])
        assert self.drafter.drafts_on_device and self.drafter.drafts_from_graphs
        depths = graph_depths(self.drafter.forward_depth, True)
        self.graphs = DraftGraphs(config(sizes), CPU, self.drafter, 3, NODES, depths)

    def requests(self, budgets: list[int], rng: np.random.Generator) -> DeviceRequests:
        count = len(budgets)
        # What an earlier step left; nobody's line is never written.
        garbage(self.graphs.batch[:-1], *(t for t in vars(self.graphs.trees).values()))
        self.table.fill_(0)
        self.table[:count] = self.pages[torch.from_numpy(rng.permutation(REQUESTS)[:count])]
        contexts = rng.integers(0, CONTEXT - 8, count)
        if (states := self.drafter.request_states) is not None:
            garbage(self.graphs.states[:-1])
            made = rng.standard_normal((count, *states.shape[1:]))
            self.drafter._roots = torch.from_numpy(made.astype(np.float32))
        return DeviceRequests(
            anchors=torch.from_numpy(rng.integers(0, VOCAB, count)),
            context_lens=torch.from_numpy(contexts.astype(np.int32)),
            budgets=torch.tensor(budgets, dtype=torch.int32),
            depths=torch.from_numpy(rng.integers(1, DEPTH + 1, count).astype(np.int32)),
            width=3,
            num_nodes=NODES,
            max_context=CONTEXT,
        )

    def eager(self, requests: DeviceRequests, chosen: np.ndarray | None = None) -> DeviceTrees:
        """The same without a graph."""
        if chosen is None:
            return self.drafter.propose_on_device(requests)
        rows = torch.from_numpy(chosen)
        return self.drafter.propose_on_device(requests.select(rows)).scatter(rows, len(requests))


@pytest.mark.parametrize("make", HEADS)
def test_drafts_of_some_requests_and_of_every_depth(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an adaptive budget asks for: of some requests, some want nothing."""
    drafts = Drafts(make, tmp_path, monkeypatch)
    drafts.graphs.capture_drafts()
    captured = {(desc.num_tokens, desc.max_query_len) for desc in drafts.graphs.graphs}
    assert captured == {(size, depth) for size in SIZES for depth in (1, 2, 4)}
    replayed: list[tuple[int, Any]] = []
    replay = drafts.graphs.run_fullgraph

    def run_fullgraph(desc: Any) -> None:
        replayed.append((desc.num_tokens, desc.max_query_len))
        replay(desc)

    monkeypatch.setattr(drafts.graphs, "run_fullgraph", run_fullgraph)
    rng = np.random.default_rng(0)
    nodes = 0
    for number in range(8):
        # Each number of drafts at least once; three requests are padded to four.
        drafted, deepest = 1 + number % REQUESTS, 1 + number // 2 % DEPTH
        count = int(rng.integers(drafted, REQUESTS + 1))
        requests = drafts.requests(rng.choice([0, 1, NODES, NODES], count).tolist(), rng)
        requests = replace(requests, depths=requests.depths.clamp_max(deepest), max_depth=deepest)
        chosen = np.sort(rng.permutation(count)[:drafted])
        given = None if len(chosen) == count else chosen
        before = PretendedGraph.replays
        trees = drafts.graphs(requests, given)
        assert PretendedGraph.replays == before + 1
        assert trees is not None and same_trees(trees, drafts.eager(requests, given), 1e-5), number
        assert (trees.counts <= requests.budgets).all()
        assert set(trees.counts.nonzero().flatten().tolist()) <= set(chosen.tolist())
        nodes += int(trees.counts.sum())
        size = min(size for size in SIZES if size >= len(chosen))
        assert replayed[-1] == (size, {1: 1, 2: 2, 3: 4, 4: 4}[deepest])
    assert nodes > 30, nodes


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_depths_that_are_captured(is_adaptive: bool) -> None:
    found = [graph_depths(deepest, is_adaptive) for deepest in (1, 2, 5, 15)]
    expected = [[1], [1, 2], [2, 3, 5], [4, 8, 15]] if is_adaptive else [[1], [2], [5], [15]]
    assert found == expected


def test_drafts_that_no_graph_was_captured_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = Drafts(causal_head, tmp_path, monkeypatch, [1, 2])
    rng = np.random.default_rng(0)
    requests = drafts.requests([NODES] * 3, rng)
    before = PretendedGraph.replays
    assert drafts.graphs(requests) is None
    drafts.graphs.capture_drafts()
    assert drafts.graphs(requests) is None
    assert drafts.graphs(replace(requests, width=2), np.array([1])) is None
    assert drafts.graphs(replace(requests, max_depth=DEPTH + 1), np.array([1])) is None
    assert PretendedGraph.replays == before
    assert drafts.graphs(requests, np.array([1])) is not None
    assert PretendedGraph.replays == before + 1


def test_a_warmup_comes_from_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = Drafts(draft_layer, tmp_path, monkeypatch, [2])
    asked = DraftRequests(
        req_ids=["a", "b"], token_ids=[np.arange(8)] * 2, context_lens=[7, 7],
        req_indices=[0, 1], budgets=[NODES] * 2, width=3, depths=[2, 2],
    )  # fmt: skip
    requests = DeviceRequests.of(asked, NODES, CPU)
    drafts.table[:2] = drafts.pages[:2]
    view = RunnerView(
        SimpleNamespace(
            speculator=SimpleNamespace(draft_graphs=drafts.graphs),
            drafter=SimpleNamespace(drafter=drafts.drafter),
        )
    )
    before = PretendedGraph.replays
    view.draft(requests)
    assert PretendedGraph.replays == before
    drafts.graphs.capture_drafts()
    before = PretendedGraph.replays
    view.draft(requests)
    assert PretendedGraph.replays == before + 1
    assert drafts.graphs.trees.counts[:2].tolist() == [NODES] * 2


Control = Callable[[DraftGraphs], AbstractContextManager[Any]]


def _elsewhere(name: str) -> Control:
    """What differs from step to step goes to memory that no graph reads."""
    return lambda graphs: patch.object(graphs, name, torch.zeros_like(getattr(graphs, name)))


def _full_depth(graphs: DraftGraphs) -> AbstractContextManager[Any]:
    """Depths of requests are not seen."""
    fill = graphs._fill

    def filled(requests: DeviceRequests, *rest: Any) -> None:
        fill(replace(requests, depths=torch.full_like(requests.depths, DEPTH)), *rest)

    return patch.object(graphs, "_fill", filled)


@pytest.mark.parametrize(
    ("make", "controls"),
    [
        (draft_layer, (*map(_elsewhere, ("batch", "lines", "states")), _full_depth)),
        (parallel_head, (_elsewhere("states"),)),
        (module_of_the_target, (_elsewhere("states"),)),
    ],
)
def test_what_a_draft_does_not_see_is_noticed(
    make: Callable[[Path], Made],
    controls: tuple[Control, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafts, rng = Drafts(make, tmp_path, monkeypatch, [2]), np.random.default_rng(0)
    drafts.graphs.capture_drafts()
    for number, control in enumerate((nullcontext, *controls)):
        with control(drafts.graphs):
            requests = drafts.requests([NODES] * 3, rng)
            requests = replace(requests, depths=requests.depths.clamp_max(1), max_depth=DEPTH)
            # Other ones than in the step before.
            chosen = np.array([number % 2, 2])
            trees = drafts.graphs(requests, chosen)
            assert trees is not None
            is_seen = same_trees(trees, drafts.eager(requests, chosen), 1e-5)
            assert is_seen == (control is nullcontext), number


@pytest.mark.parametrize("make", [causal_head, bidirectional_head, markov_head, local_head])
def test_contexts_of_every_number_of_rows(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts, sizes = Drafts(make, tmp_path, monkeypatch), [1, 2, 5, 8]
    drafter, rng = drafts.drafter, np.random.default_rng(0)
    assert drafter.observes_from_graphs
    states = [torch.randn(8, HIDDEN) for _ in drafter.config.target_layer_ids]
    graphs = ContextGraphs(config(sizes), CPU, drafter)
    num_slots = PAGE * (len(drafts.caches[0]) - 1)

    def after(observe: Callable[[], Any]) -> tuple[Any, list[torch.Tensor]]:
        """What it returned, and the pages; they are as before then."""
        before = [cache.clone() for cache in drafts.caches]
        result = observe()
        # Without that of slots that are none.
        found = [cache[1:].clone() for cache in drafts.caches]
        for cache, old in zip(drafts.caches, before, strict=True):
            cache.copy_(old)
        return result, found

    _, untouched = after(lambda: graphs.capture_contexts(states))
    assert all(torch.equal(a, c[1:]) for a, c in zip(untouched, drafts.caches, strict=True))
    assert sorted(desc.num_tokens for desc in graphs.graphs) == sizes
    for number in range(16):
        count = 1 + number % 8
        garbage(*states)
        # What earlier steps left.
        for column, most in enumerate((8, CONTEXT, num_slots)):
            graphs.columns[:, column] = torch.from_numpy(rng.integers(0, most, 8))
        slots = torch.from_numpy(PAGE + rng.permutation(num_slots)[:count])
        slots[rng.random(count) < 0.3] = -1
        committed = CommittedTokens(
            # What the target's graph returns has its rows of padding.
            aux_hidden_states=[state[: min(8, count + 1)] for state in states],
            rows=torch.from_numpy(rng.permutation(count)),
            positions=torch.from_numpy(rng.integers(0, CONTEXT, count)),
            slots=slots,
        )
        was_served, found = after(lambda: graphs(committed))  # noqa: B023
        _, wanted = after(lambda: drafter.observe(committed))  # noqa: B023
        assert was_served
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
        # A forward of no graph.
        elsewhere = replace(committed, aux_hidden_states=[s.clone() for s in states])
        was_served, found = after(lambda: graphs(elsewhere))  # noqa: B023
        assert not was_served
        assert all(torch.equal(a, c[1:]) for a, c in zip(found, drafts.caches, strict=True))


def test_contexts_need_graphs_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = Drafts(causal_head, tmp_path, monkeypatch)
    graphs = ContextGraphs(config(SIZES), CPU, drafts.drafter)
    graphs.capture_contexts([])
    assert not graphs.graphs
    one = torch.zeros(1, dtype=torch.int64)
    assert not graphs(CommittedTokens([torch.zeros(1, HIDDEN)], one, one, one))
