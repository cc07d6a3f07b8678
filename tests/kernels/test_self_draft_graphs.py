# SPDX-License-Identifier: Apache-2.0
"""Draft forwards of the target itself from graphs, against the same drafts without one, over steps
in which partial caches are chosen, take tokens in, and end; Triton runs in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.tiny import HIDDEN, make_tokenswift_heads
from tests.kernels.bound_backend import triton_backend
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
    same_trees,
)
from tests.pretended_graph import CaptureError, PretendedGraph
from tests.unit.drafters import load_drafter

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_specplug.drafting.caches import PartialCacheSpec
from vllm_specplug.drafting.device_requests import (
    DeviceRequests,
    DeviceTrees,
    TokenHistory,
)
from vllm_specplug.drafting.requests import DraftPenalties
from vllm_specplug.methods.tokenswift.drafter import TokenSwiftDrafter
from vllm_specplug.vllm_v2.draft_graphs import DraftGraphs
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.device_self_draft import DeviceSelfDraft

pytestmark = pytest.mark.usefixtures("interpreter", "pretended_pool")

LAYERS, DEPTH, BUDGET, SINK = 2, 3, 40, 6
SIZES = [2, REQUESTS]


class Target:
    """A runner's view with a target of two layers over random pages."""

    device, dtype, vocab_size = CPU, torch.float32, VOCAB
    max_model_len, max_requests = CONTEXT, REQUESTS

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw)

        self.caches = {
            f"layers.{i}": numbers(1 + REQUESTS * BLOCKS, KV_HEADS, PAGE, 2 * DIM)
            for i in range(LAYERS)
        }
        # Its page is nobody's.
        for cache in self.caches.values():
            cache[0] = float("nan")
        self.embeddings = numbers(VOCAB, HIDDEN)
        width = (HEADS + 2 * KV_HEADS) * DIM
        self.joint = [numbers(HIDDEN, width) / HIDDEN**0.5 for _ in range(LAYERS)]
        self.out = [numbers(HEADS * DIM, HIDDEN) for _ in range(LAYERS)]
        self.pages = 1 + torch.randperm(REQUESTS * BLOCKS, generator=draw).view(-1, BLOCKS).int()
        self.table = torch.zeros(REQUESTS, BLOCKS, dtype=torch.int32)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1)
        )
        self.runner = SimpleNamespace(lora_config=None)

    def target_caches(self) -> dict[str, torch.Tensor]:
        return self.caches

    def block_table(self, group: int = 0) -> torch.Tensor:
        return self.table

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: dict[str, Any], rows: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        hidden = self.embeddings[ids] + 0.1 * torch.sin(positions[:, None].float())
        for i, name in enumerate(self.caches):
            mixed = hidden @ self.joint[i]
            sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
            query, key, value = (p.unflatten(1, (-1, DIM)) for p in mixed.split(sizes, dim=1))
            layer = SimpleNamespace(layer_name=name, impl=SimpleNamespace(scale=DIM**-0.5))
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
            attention[name].attend(layer, query, key.contiguous(), value.contiguous(), output)
            hidden = hidden + output.flatten(1) @ self.out[i]
        return hidden, [hidden]


@dataclass
class Step:
    """Requests by name, with the tokens of their contexts; their budgets."""

    contexts: dict[str, int]
    budgets: list[int]


class Drafts:
    """The target as its own draft, with graphs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target = Target()
        if not folder.exists():
            make_tokenswift_heads(folder, VOCAB)
        spec = PartialCacheSpec(BUDGET, SINK, 3, ("self_draft_requests", "kv_budget"))
        self.drafter = load_drafter(
            TokenSwiftDrafter, folder, spec, self.target.embeddings, num_nodes=NODES,
            tree_depth=DEPTH, max_depth=NODES, tree_width=3, max_model_len=CONTEXT,
        )  # fmt: skip
        self.graphs = DraftGraphs(config(SIZES), CPU, self.drafter, 3, NODES, [DEPTH])
        # Before caches are bound there is nothing to capture.
        self.graphs.capture_drafts()
        assert self.drafter.drafts_from_graphs and not self.graphs.graphs
        limits = StepLimits(REQUESTS, 64, NODES + 1, CONTEXT)
        backend = triton_backend(HEADS, limits, monkeypatch)
        backend.block_size = PAGE
        self.forward = DeviceSelfDraft(self.target, spec, backend)  # type: ignore[arg-type]
        self.drafter.bind_target_forward(self.forward)
        # By name: the row of the pages, which does not change.
        self.lines: dict[str, int] = {}

    def requests(self, step: Step) -> DeviceRequests:
        count, lens = len(step.contexts), list(step.contexts.values())
        for name in step.contexts:
            self.lines.setdefault(name, len(self.lines))
        # What an earlier step left; nobody's line is never written.
        garbage(self.graphs.batch[:-1], *(t for t in vars(self.graphs.trees).values()))
        self.target.table.fill_(0)
        self.target.table[:count] = self.target.pages[[self.lines[n] for n in step.contexts]]
        history = TokenHistory(
            torch.zeros(1), torch.zeros(1), list(step.contexts), [0] * count,
            [b > 0 for b in step.budgets],
            min_context_lens=[n - 1 for n in lens], max_context_lens=[n + 1 for n in lens],
        )  # fmt: skip
        budgets = torch.tensor(step.budgets, dtype=torch.int32)
        return DeviceRequests(
            anchors=torch.tensor([(7 * n + r) % VOCAB for r, n in enumerate(lens)]),
            context_lens=torch.tensor(lens, dtype=torch.int32), budgets=budgets,
            depths=torch.full_like(budgets, DEPTH), width=3, num_nodes=NODES,
            max_context=CONTEXT, history=history,
        )  # fmt: skip

    def draft(self, step: Step, *, launched: bool = False) -> tuple[DeviceTrees, bool]:
        """Trees, and whether they came from a graph."""
        requests, before = self.requests(step), PretendedGraph.replays
        trees = None if launched else self.graphs(requests)
        if trees is None:
            trees = self.drafter.propose_on_device(requests)
        assert trees is not None
        return trees, PretendedGraph.replays > before


N = NODES
STEPS = [
    # None fits a partial cache.
    (Step({"a": 20, "b": 30}, [N, N]), True),
    # "b" outgrows the budget, for certain a step later.
    (Step({"a": 22, "b": 41}, [N, N]), True),
    (Step({"a": 24, "b": 43}, [N, N]), False),
    (Step({"a": 26, "b": 45, "c": 60}, [N, N, N]), False),
    (Step({"a": 28, "b": 47, "c": 62}, [N, N, N]), True),
    # In another order, and one without a draft.
    (Step({"c": 64, "a": 28, "b": 49}, [N, 0, N]), True),
    # "b" has taken in as many as it may.
    (Step({"c": 65, "a": 28, "b": 76}, [N, N, N]), False),
    (Step({"c": 66, "b": 77}, [N, N]), True),
    (Step({"b": 78}, [N]), True),
]


def drafted_alike(drafts: Drafts, others: Drafts) -> Iterator[bool]:
    """Of each step, whether trees are those of launched drafts."""
    drafts.graphs.capture_drafts()
    assert sorted(desc.num_tokens for desc in drafts.graphs.graphs) == SIZES
    nodes = 0
    for number, (step, from_graph) in enumerate(STEPS):
        trees, replayed = drafts.draft(step)
        assert replayed == from_graph, number
        expected, _ = others.draft(step, launched=True)
        # Contexts are split by other bounds.
        yield same_trees(trees, expected, 1e-4)
        nodes += int(expected.counts.sum())
    assert nodes > 60, nodes
    assert drafts.drafter.steps_from == others.drafter.steps_from == {"self": len(STEPS)}


def test_drafts_from_graphs_are_those_that_are_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts, others = (Drafts(tmp_path / "heads", monkeypatch) for _ in range(2))
    assert all(drafted_alike(drafts, others))
    pools = drafts.forward.pool.pages, others.forward.pool.pages
    assert all(torch.equal(*pair) for pair in zip(*pools, strict=True))


@pytest.mark.parametrize("left_out", ["regions", "new tokens"])
def test_what_a_graph_does_not_see_is_noticed(
    left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls."""
    drafts, others = (Drafts(tmp_path / "heads", monkeypatch) for _ in range(2))
    nothing: Any = lambda *args: None  # noqa: E731
    if left_out == "regions":
        monkeypatch.setattr(DeviceSelfDraft, "_send", nothing)
    else:
        monkeypatch.setattr(drafts.forward.pool, "_take_in", nothing)
    assert not all(drafted_alike(drafts, others))


def test_a_choice_in_a_capture_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: host numbers go to the device where partial caches move."""
    drafts = Drafts(tmp_path / "heads", monkeypatch)
    given = drafts.requests(Step({"c": 60}, [N]))
    assert given.history is not None
    history, lens = given.history, given.context_lens.long()
    stock, pool = DeviceSelfDraft.graph_attention, drafts.forward.pool

    def choosing(self: DeviceSelfDraft, requests: DeviceRequests) -> Any:
        pool.forget(["c"])
        pool.advance(history, lens, [0], drafts.target.table)
        return stock(self, requests)

    monkeypatch.setattr(DeviceSelfDraft, "graph_attention", choosing)
    with pytest.raises(CaptureError, match="host"):
        drafts.graphs.capture_drafts()


def test_penalties_ranks_and_adapters_are_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = Drafts(tmp_path / "heads", monkeypatch)
    drafts.graphs.capture_drafts()
    requests = drafts.requests(STEPS[0][0])
    assert drafts.graphs(requests) is not None
    penalties = DraftPenalties(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2))
    assert requests.history is not None
    given = replace(requests, history=replace(requests.history, penalties=penalties))
    before = PretendedGraph.replays
    assert drafts.graphs(given) is None
    assert drafts.drafter.propose_on_device(given) is not None
    # Dummy requests have no history.
    assert drafts.graphs(replace(requests, history=None)) is None
    assert PretendedGraph.replays == before
    assert drafts.drafter.steps_from == {"self": 2}
    parallel = drafts.target.vllm_config.parallel_config
    for owner, name, value in (
        (parallel, "world_size", 2), (parallel, "data_parallel_size", 2),
        (drafts.target.runner, "lora_config", object()),
    ):  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            assert not drafts.drafter.can_be_captured
    assert drafts.drafter.can_be_captured
