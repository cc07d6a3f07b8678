# SPDX-License-Identifier: Apache-2.0
"""Graphs of whole forwards and of drafts as on CUDA, pretended where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.config.compilation import CUDAGraphMode

from tests.e2e.cuda import cuda_device
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Pair
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
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


@contextmanager
def known_on_the_device() -> Iterator[None]:
    """`knowing_candidates` in operations that a graph can hold and that wait for nothing: what
    follows an anchor in the first of the oracle's sequences that has it at its position is the best
    and the second best in turns."""
    block, drafted = BlockHeadDrafter.candidates, DeviceSpeculator._drafted
    device = cuda_device.DEVICE
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
        ranks = torch.arange(1, log_probs.shape[-1] + 1, device=device)
        return ids, ranks.mul(-0.4).expand(log_probs.shape).contiguous()

    def with_table(self: Any, *args: Any) -> Any:
        told = torch.full(table.shape, -1)
        for line, tokens in zip(told, OracleDrafter.sequences, strict=False):
            line[: len(tokens)] = torch.tensor(tokens)
        table.copy_(told, non_blocking=True)
        return drafted(self, *args)

    with (
        patch.object(BlockHeadDrafter, "candidates", candidates),
        patch.object(DeviceSpeculator, "_drafted", with_table),
    ):
        yield


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
