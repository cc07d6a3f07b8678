# SPDX-License-Identifier: Apache-2.0
"""A draft forward's attention over pages and over its own rows, on a CPU and as the CUDA backend
runs it, Triton interpreted: that of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.tree_problem import chain_attention

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel, load_kernel
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.memory import device_draft_cache
from vllm_specplug.vllm_worker.memory.draft_cache import PagedDraftCache

pytestmark = pytest.mark.usefixtures("interpreter")

PAGE, HEADS, KV_HEADS, DIM, ROWS = 32, 4, 2, 32, 5
CONTEXTS = (0, 7, 300)
SCALE = DIM**-0.5


def on_the_device(order: list[int]) -> DeviceRequests:
    """All requests of the batch, those not in `order` without a draft and any context."""
    count = len(CONTEXTS)
    contexts = [CONTEXTS[r] if r in order else 10**6 for r in range(count)]
    return DeviceRequests(
        anchors=torch.ones(count, dtype=torch.int64),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        budgets=torch.tensor([3 * (r in order) for r in range(count)], dtype=torch.int32),
        depths=torch.ones(count, dtype=torch.int32),
        width=1,
        num_nodes=3,
        max_context=max(CONTEXTS),
    )


def store(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As a device's store."""
    cache[slots // PAGE, :, slots % PAGE] = torch.cat((key, value), -1)


def draft_cache(
    monkeypatch: pytest.MonkeyPatch, windows: Sequence[int | None], is_cuda: bool
) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """A cache of a layer for each window with random contexts, and their keys and values of each
    request, [layers, context, Hkv, Dh]."""
    torch.manual_seed(0)
    blocks = -(-max(CONTEXTS) // PAGE)
    table = torch.randperm(len(CONTEXTS) * blocks).view(len(CONTEXTS), blocks).int()
    layers: Any = [
        SimpleNamespace(
            kv_cache=torch.full((table.numel(), KV_HEADS, PAGE, 2 * DIM), float("nan")),
            spec=SimpleNamespace(window=window),
        )
        for window in windows
    ]
    if is_cuda:
        monkeypatch.setattr(CudaTreeBackend, "cache_writer", lambda self: store)
        backend = CudaTreeBackend("auto", HEADS, StepLimits(4, 64, 9, 512), torch.device("cpu"))
        # What serves the target says nothing of what serves the head.
        backend.kernel = ChosenKernel("cute", print, "")
        triton_kernel = ChosenKernel("triton", load_kernel("triton"), "")
        monkeypatch.setattr(backend, "choose", lambda *shape, **use: triton_kernel)
        cache: Any = backend.draft_cache(layers, lambda: table, SCALE)
    else:
        cache = PagedDraftCache(layers, lambda: table, SCALE)
    keys, values = [], []
    for r, context in enumerate(CONTEXTS):
        at = torch.arange(context)
        slots = table[r, at // PAGE].long() * PAGE + at % PAGE
        assert is_cuda or cache.slots(r, context).tolist() == slots.tolist()
        key, value = torch.randn(2, len(windows), context, KV_HEADS, DIM)
        cache.write(key, value, slots)
        keys.append(key)
        values.append(value)
    return cache, keys, values


# Parents of the rows of a tree, by request.
PARENTS = {0: [-1, 0, 0, 2, 1], 1: [-1, 0, 1, 2, 3], 2: [-1, 0, 0, 0, 3]}
# One window ends within a page, the other is shorter than the block is deep.
WINDOWS = (21, 3)


def own_rows(shape: Any, layer: int, r: int, row: int) -> list[int]:
    """The rows of its block that a row attends, in the order of their positions."""
    if shape == "tree":
        branch = [row]
        while branch[0]:
            branch.insert(0, PARENTS[r][branch[0]])
        return branch
    causal = shape if isinstance(shape, bool) else shape[layer]
    return list(range(row + 1 if causal else ROWS))


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("shape", "windows"),
    [
        (True, (None, None)),
        (False, (None, None)),
        ((False, False), WINDOWS),
        ((True, False), WINDOWS),
        ((False, True), WINDOWS),
        # A row of its own only, ends of pages, and more than any context.
        *(((True, False), windows) for windows in ((1, 32), (33, 5), (300, 4096))),
        *(((False, True), windows) for windows in ((1, 32), (33, 5), (300, 4096))),
        ("tree", (None, None)),
        ("tree", WINDOWS),
    ],
)
def test_rows_attend_their_pages_and_their_block(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    shape: Any,
    windows: tuple[int | None, ...],
    place: str,
) -> None:
    if place == "cpu":
        request.getfixturevalue("vllm_cpu_ops")
    cache, keys, values = draft_cache(monkeypatch, windows, place != "cpu")
    # A later step finds the words of the one before in its buffers.
    for order in ([0, 1, 2], [2, 0]):
        given: Any = on_the_device(order)
        held = [*range(len(CONTEXTS))]
        if place == "cpu":
            held = order
            given = DraftRequests(
                token_ids=[np.array([1])] * len(order),
                context_lens=[CONTEXTS[r] for r in order],
                req_indices=order,
            )
        if shape == "tree":
            lines = np.array([PARENTS[r] for r in held], dtype=np.int32)
            parents: Any = [*(lines[:, 1:] - 1)] if place == "cpu" else torch.from_numpy(lines)
            contexts = torch.tensor([CONTEXTS[r] for r in held])
            attend = cache.tree_attention(given, contexts, parents)
        else:
            attend = cache.block_attention(given, ROWS, shape)
        for layer, window in enumerate(windows):
            query = torch.randn(ROWS * len(held), HEADS, DIM)
            key, value = torch.randn(2, ROWS * len(held), KV_HEADS, DIM).unbind(0)
            output = attend(layer, query, key, value)
            for at, r in enumerate(held):
                for row in range(ROWS) if r in order else ():
                    own = own_rows(shape, layer, r, row)
                    depth = len(own) - 1 if shape == "tree" else row
                    first = 0 if window is None else max(0, CONTEXTS[r] + depth - window + 1)
                    seen = [at * ROWS + i for i in own[max(0, first - CONTEXTS[r]) :]]
                    expected = chain_attention(
                        query[at * ROWS + row],
                        torch.cat((keys[r][layer, first:], key[seen])),
                        torch.cat((values[r][layer, first:], value[seen])),
                        SCALE,
                    )
                    assert (output[at * ROWS + row].double() - expected).abs().max() < 2e-5


@pytest.mark.parametrize(("place", "most"), [("cpu", 4096), ("cuda", 4096), ("cuda", 3)])
def test_committed_tokens_attend_the_tokens_before_them(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, place: str, most: int
) -> None:
    """Rows of two requests, in one call and in pieces; on CUDA one of them has no slot."""
    monkeypatch.setattr(device_draft_cache, "_MAX_CONTEXT_ROWS", most)
    windows = (None, 5)
    if place == "cpu":
        request.getfixturevalue("vllm_cpu_ops")
    cache, keys, values = draft_cache(monkeypatch, windows, place == "cuda")
    places = [(1, 0), (2, 288), (1, 6), (2, 3), (1, 2), (2, 299), (1, 4)]
    rows, positions = (torch.tensor(column) for column in zip(*places, strict=True))
    slots = torch.arange(len(places))
    if place == "cuda":
        slots[4] = -1
    attend = cache.context_attention(rows.int(), positions, slots)
    for layer, window in enumerate(windows):
        query = torch.randn(len(places), HEADS, DIM)
        key, value = torch.stack(
            [torch.stack((keys[r][layer, at], values[r][layer, at])) for r, at in places], dim=1
        )
        output = attend(layer, query, key, value)
        for i, (r, at) in enumerate(places):
            if slots[i] < 0:
                continue
            seen = slice(max(0, at + 1 - (window or at + 1)), at + 1)
            expected = chain_attention(
                query[i], keys[r][layer, seen], values[r][layer, seen], SCALE
            )
            assert (output[i].double() - expected).abs().max() < 2e-5
