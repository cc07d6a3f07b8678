# SPDX-License-Identifier: Apache-2.0
"""A draft forward's attention as the CUDA backend runs it: pages and block, Triton interpreted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.paged import chain_attention

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel, load_kernel
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.memory import device_draft_cache

pytestmark = pytest.mark.usefixtures("interpreter")

PAGE, HEADS, KV_HEADS, DIM, ROWS = 16, 4, 2, 16, 5
CONTEXTS = (0, 7, 300)


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


def draft_cache(monkeypatch, windows: tuple[int | None, ...]):
    """A cache of two layers with random contexts, and their keys and values of each request,
    [layers, context, Hkv, Dh]."""
    torch.manual_seed(0)
    monkeypatch.setattr(CudaTreeBackend, "cache_writer", lambda self: print)
    backend = CudaTreeBackend("auto", HEADS, StepLimits(4, 64, 9, 512), torch.device("cpu"))
    # What serves the target says nothing of what serves the head.
    backend.kernel = ChosenKernel("cute", print, "")
    triton_kernel = ChosenKernel("triton", load_kernel("triton"), "")
    monkeypatch.setattr(backend, "choose", lambda *shape, **use: triton_kernel)
    blocks = -(-max(CONTEXTS) // PAGE)
    table = torch.randperm(len(CONTEXTS) * blocks).view(len(CONTEXTS), blocks).int()
    caches = [torch.full((table.numel(), KV_HEADS, PAGE, 2 * DIM), float("nan")) for _ in range(2)]
    keys, values = [], []
    for r, context in enumerate(CONTEXTS):
        keys.append(torch.randn(2, context, KV_HEADS, DIM))
        values.append(torch.randn(2, context, KV_HEADS, DIM))
        for layer, cache in enumerate(caches):
            for slot in range(context):
                at = cache[int(table[r, slot // PAGE]), :, slot % PAGE]
                at[:, :DIM], at[:, DIM:] = keys[r][layer, slot], values[r][layer, slot]
    drafts = backend.draft_cache(
        [
            SimpleNamespace(kv_cache=cache, spec=SimpleNamespace(window=window))
            for cache, window in zip(caches, windows, strict=True)
        ],
        lambda: table,
        DIM**-0.5,
    )
    return drafts, keys, values


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


@pytest.mark.parametrize("is_device", [False, True])
@pytest.mark.parametrize(
    ("shape", "windows"),
    [
        (True, (None, None)),
        (False, (None, None)),
        ((False, False), WINDOWS),
        ((True, False), WINDOWS),
        ((False, True), WINDOWS),
        ("tree", (None, None)),
    ],
)
def test_rows_attend_their_pages_and_their_block(
    monkeypatch, shape: Any, windows: tuple[int | None, ...], is_device: bool
) -> None:
    drafts, keys, values = draft_cache(monkeypatch, windows=windows)
    # A later step finds the words of the one before in its buffers.
    for order in ([0, 1, 2], [2, 0]):
        requests = DraftRequests(
            token_ids=[np.array([1])] * len(order),
            context_lens=[CONTEXTS[r] for r in order],
            req_indices=order,
        )
        given = on_the_device(order) if is_device else requests
        held = range(len(CONTEXTS)) if is_device else order
        if shape == "tree":
            parents = torch.tensor([PARENTS[r] for r in held], dtype=torch.int32)
            contexts = torch.tensor([CONTEXTS[r] for r in held])
            attend = drafts.tree_attention(given, contexts, parents)
        else:
            attend = drafts.block_attention(given, ROWS, shape)
        for layer, window in enumerate(windows):
            query = torch.randn(ROWS * len(held), HEADS, DIM)
            key, value = torch.randn(2, ROWS * len(held), KV_HEADS, DIM).unbind(0)
            output = attend(layer, query, key, value)
            for place, r in enumerate(held):
                for row in range(ROWS) if r in order else ():
                    at = [place * ROWS + own for own in own_rows(shape, layer, r, row)]
                    first = 0 if window is None else max(0, CONTEXTS[r] + row - window + 1)
                    at = at[max(0, first - CONTEXTS[r]) :]
                    expected = chain_attention(
                        query[place * ROWS + row],
                        torch.cat((keys[r][layer, first:], key[at])),
                        torch.cat((values[r][layer, first:], value[at])),
                        DIM**-0.5,
                    )
                    assert (output[place * ROWS + row].double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("most", [4096, 3])
def test_committed_tokens_attend_the_tokens_before_them(monkeypatch, most: int) -> None:
    """Rows of two requests, in one call and in pieces; one of them has no slot."""
    monkeypatch.setattr(device_draft_cache, "_MAX_CONTEXT_ROWS", most)
    windows = (None, 5)
    drafts, keys, values = draft_cache(monkeypatch, windows=windows)
    places = [(1, 0), (2, 288), (1, 6), (2, 3), (1, 2), (2, 299), (1, 4)]
    rows, positions = (torch.tensor(column) for column in zip(*places, strict=True))
    slots = torch.arange(len(places))
    slots[4] = -1
    attend = drafts.context_attention(rows.int(), positions, slots)
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
                query[i], keys[r][layer, seen], values[r][layer, seen], DIM**-0.5
            )
            assert (output[i].double() - expected).abs().max() < 1e-5
