# SPDX-License-Identifier: Apache-2.0
"""Graphs of whole forwards and of drafts as on CUDA, pretended where there is no GPU; see
`cuda_checks`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

# Before vLLM: it puts Triton's interpreter in place.
import tests.e2e.cuda.cuda_checks  # noqa: F401  # isort: skip

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from tests.e2e.budgets import FLAT, freeze_costs
from tests.e2e.cuda import cuda_device
from tests.e2e.cuda.cuda_checks import WINDOW_PROMPTS, compare, compare_windows, engines
from tests.e2e.cuda.cuda_self_checks import LONG, SELF, watching
from tests.e2e.families import engine_of
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Pair
from tests.e2e.requests import greedy
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.methods.eagle3_tree.drafter import DeviceLevels
from vllm_specplug.vllm_v2 import graph_trees
from vllm_specplug.vllm_v2.context_graphs import ContextGraphs
from vllm_specplug.vllm_v2.device_speculator import DeviceSpeculator
from vllm_specplug.vllm_v2.draft_graphs import DraftGraphs


@contextmanager
def full_graphs() -> Iterator[None]:
    """Engines built and run here capture and replay graphs."""
    with cuda_device.graphs(), patch.dict(os.environ, {FULL_GRAPHS_VARIABLE: "1"}):
        yield


@contextmanager
def steps_from_graphs(made: Pair) -> Iterator[None]:
    """Forwards of decoding requests come from graphs, of which some hold rows and requests of
    padding."""
    manager, seen = made.runner.cudagraph_manager, []
    dispatch, before = manager.dispatch, cuda_device.num_replays()

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        desc = dispatch(*args, **kwargs)
        seen.append((desc.num_tokens - args[1], (desc.num_reqs or args[0]) - args[0], desc))
        return desc

    with patch.object(manager, "dispatch", dispatched):
        yield
    whole = [s for s in seen if s[2].cg_mode == CUDAGraphMode.FULL]
    assert len(whole) > 2 and len(whole) <= cuda_device.num_replays() - before, seen
    # Rows and requests of padding.
    assert any(rows for rows, *_ in whole) and any(requests for _, requests, _ in whole), seen


def _compare_graphs(method: str, ahead: bool, **options: Any) -> Pair:
    """Compares with plain vLLM; forwards of decoding requests come from graphs."""
    made = engines(method, ahead=ahead, **options)
    with steps_from_graphs(made):
        assert compare(made, ahead).skipping > 1
    return made


def check_ragged_trees_from_graphs() -> None:
    for ahead in (False, True):
        with full_graphs():
            _compare_graphs("oracle", ahead)


def check_groups_and_caches_of_bytes_from_graphs() -> None:
    """gpt-oss: windows, sinks and KV cache groups of their own; also over e4m3."""
    cuda_device.need_experts()
    for cache in ("auto", "fp8"):
        with full_graphs():
            made = engines(ahead=True, target={**engine_of("GptOss"), "kv_cache_dtype": cache})
            with steps_from_graphs(made):
                if cuda_device.ON_GPU and cache == "fp8":
                    made.compare_up_to_ties(WINDOW_PROMPTS, 20, margin=0.25)
                else:
                    assert compare_windows(made).skipping > 1


def check_graphs_without_their_trees_diverge() -> None:
    """The control: every request is a chain."""
    kind = graph_trees.GraphTrees
    fill = kind.fill
    chains = patch.object(kind, "fill", lambda self, trees, *rest: fill(self, None, *rest))
    with full_graphs(), chains, pytest.raises(AssertionError, match="request"):
        _compare_graphs("oracle", True)


def check_graphs_of_other_buffers_diverge() -> None:
    """The control: a step's trees lie where no graph looks."""
    with full_graphs():
        made = engines(ahead=True)
        backend = made.runner.tree_backend
        other = graph_trees.GraphTrees(backend.limits, backend.device)
        # What the last step left would be read with another number of requests: out of bounds.
        with torch.inference_mode():
            for tensor in vars(backend.graph_trees).values():
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
        elsewhere = patch.object(backend, "graph_trees", other)
        with elsewhere, pytest.raises(AssertionError, match="request"):
            compare(made, True)


def check_adaptive_budget_from_graphs() -> None:
    """Its costs are measured with graphs of dummies that have a context."""
    with full_graphs():
        made = _compare_graphs("oracle", True, budget="auto", nodes=7)
    assert made.runner.planner.adaptive.costs.draft is not None


@contextmanager
def known_on_the_device(
    device: torch.device | str | None = cuda_device.DEVICE,
) -> Iterator[None]:
    """`knowing_candidates` and `knowing` in operations that a graph can hold and that wait for
    nothing: what follows an anchor in the first of the oracle's sequences that has it at its
    position is the best and the second best in turns."""
    block, level, drafted = (
        BlockHeadDrafter.candidates, DeviceLevels.expand, DeviceSpeculator._drafted,
    )  # fmt: skip
    # [K, L], -1 past a sequence's end
    table = torch.full((8, 128), -1, device=device)

    def told(requests: DeviceRequests, depth: int) -> torch.Tensor:
        """[R, depth]"""
        at = requests.context_lens.long().clamp(0, table.shape[1] - depth - 1)
        line = (table[:, at] == requests.anchors).int().argmax(0)
        return table[line[:, None], at[:, None] + torch.arange(1, depth + 1, device=device)]

    def candidates(self: Any, requests: Any, depth: int, width: int) -> Any:
        ids, log_probs = block(self, requests, depth, width)
        if not isinstance(requests, DeviceRequests):
            return ids, log_probs
        for d, tokens in enumerate(told(requests, depth).unbind(1)):
            place = (d + 1) % 2
            ids[:, d, place] = torch.where(tokens >= 0, tokens, ids[:, d, place])
        return ids, _falling(log_probs)

    def expand(self: Any, frontier: Any) -> Any:
        ids, log_probs = level(self, frontier)
        if not isinstance(self.requests, DeviceRequests):
            return ids, log_probs
        tokens = told(self.requests, frontier.depth + 1)[:, -1:]
        place = (frontier.depth + 1) % 2
        ids[:, :, place] = torch.where(tokens >= 0, tokens, ids[:, :, place])
        return ids, _falling(log_probs)

    def with_table(self: Any, *args: Any) -> Any:
        told = torch.full(table.shape, -1)
        for line, tokens in zip(told, OracleDrafter.sequences, strict=False):
            line[: len(tokens)] = torch.tensor(tokens)
        table.copy_(told, non_blocking=True)
        return drafted(self, *args)

    with (
        patch.object(BlockHeadDrafter, "candidates", candidates),
        patch.object(DeviceLevels, "expand", expand),
        patch.object(DeviceSpeculator, "_drafted", with_table),
    ):
        yield


def _falling(log_probs: torch.Tensor) -> torch.Tensor:
    width = log_probs.shape[-1]
    ranks = torch.arange(1, width + 1, device=log_probs.device)
    return ranks.mul(-0.4).expand(log_probs.shape).contiguous()


@contextmanager
def draft_replays(kind: type = DraftGraphs) -> Iterator[list[Any]]:
    """Yields what is replayed of drafts, or of another kind of graphs."""
    # The methods of vLLM's class are shared.
    replay, replayed = kind.run_fullgraph, []  # type: ignore[attr-defined]

    def run_fullgraph(self: Any, desc: Any) -> None:
        replayed.append(desc)
        replay(self, desc)

    with patch.object(kind, "run_fullgraph", run_fullgraph):
        yield replayed


def check_block_heads_from_graphs() -> None:
    for method in ("jetspec", "ddtree"):
        with full_graphs(), known_on_the_device(), draft_replays(ContextGraphs) as contexts:
            made = _compare_graphs(method, True, ngram_topk=0, nodes=10)
        assert len(made.runner.speculator.draft_graphs.graphs) == 3
        # As the forwards of decoding requests.
        assert len({desc.num_tokens for desc in contexts}) > 1 and len(contexts) > 4, contexts


def check_draft_layers_from_graphs() -> None:
    """A head's, and the module that a target ships."""
    for method in ("eagle3_tree", "mtp_tree"):
        options: dict[str, Any] = {"ngram_topk": 0, "nodes": 10}
        with full_graphs(), known_on_the_device():
            made = engines(method, ahead=True, **options)
            with draft_replays() as replayed:
                assert _compare_graphs(method, True, **options) is made
        assert len(made.runner.speculator.draft_graphs.graphs) == 3
        assert len(replayed) > 4, replayed


def check_block_heads_under_an_adaptive_budget_from_graphs() -> None:
    """Who is drafted for is decided in every step; drafts are replays all the same."""
    with full_graphs(), known_on_the_device():
        made = engines("jetspec", ahead=True, nodes=10, budget="auto")
        freeze_costs(made, FLAT)
        with draft_replays() as replayed:
            assert compare(made, True).skipping > 1
    assert len(replayed) > 4, replayed


def check_the_target_drafts_for_itself_from_graphs() -> None:
    """Between two selections, which are launched."""
    with full_graphs(), watching() as seen:
        made = engines("tokenswift", ahead=True, ngram_topk=0, nodes=6, head=SELF)
        drafter = made.runner.drafter.drafter
        drafter.steps_from.clear()
        with draft_replays() as replayed:
            made.compare([[5, 6, 7, 8, 5, 6, 7], LONG[0]], greedy(max_tokens=14))
    assert len(replayed) > 4 and seen.chosen and seen.far < 1e-4, (replayed, seen)
    assert drafter.steps_from["self"] > len(replayed)
