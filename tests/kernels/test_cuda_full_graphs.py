# SPDX-License-Identifier: Apache-2.0
"""What a full graph replays: the call as it was captured, over the buffers as each step fills them.

Without a device the captured call is made again by hand; Triton runs in the interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.kernels.paged import chain_attention, path_of

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel, load_kernel
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_attention.gpu import gpu_cache_views
from vllm_specplug.vllm_attention.tree_rows import tree_rows_of
from vllm_specplug.vllm_v1.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.step import StepRequest, TreeStep

pytestmark = pytest.mark.usefixtures("interpreter")

PAGE, HEADS, KV_HEADS, DIM, ROWS, PLACES, BLOCKS = 16, 2, 1, 16, 5, 4, 4


def tree_of(parents: list[int]) -> DraftTree:
    depths = np.zeros(len(parents), np.int32)
    for node, parent in enumerate(parents):
        depths[node] = 1 if parent < 0 else depths[parent] + 1
    return DraftTree(
        np.arange(len(parents)), np.array(parents, np.int32), depths, np.zeros(4, np.float32)
    )


FORK, BUSH = [-1, -1, 0, 1], [-1, 0, 0, 2]
# Steps of one engine: (context, parents of the drafts; None for drafts that form no tree).
STEPS = [
    [(3, FORK), (30, BUSH)],
    [(9, None), (31, FORK), (0, BUSH), (59, None)],
    [(40, BUSH)],
]


def test_a_captured_call_serves_the_trees_of_every_step(monkeypatch) -> None:
    monkeypatch.setenv(FULL_GRAPHS_VARIABLE, "1")
    torch.manual_seed(0)
    limits = StepLimits(PLACES, PLACES * ROWS, ROWS, BLOCKS * PAGE)
    backend = CudaTreeBackend("auto", HEADS, limits, torch.device("cpu"))
    backend.kernel = ChosenKernel("triton", load_kernel("triton"), "")
    backend.views = gpu_cache_views
    cache = torch.randn(PLACES * BLOCKS, KV_HEADS, PAGE, 2 * DIM)
    table = torch.randperm(PLACES * BLOCKS).view(PLACES, BLOCKS).int()
    common = SimpleNamespace(
        block_table_tensor=table,
        num_reqs=PLACES,
        max_query_len=ROWS,
        num_actual_tokens=PLACES * ROWS,
    )
    held = SimpleNamespace()
    backend.attach({"a": held}, TreeStep([]), common, for_capture=True)
    captured = tree_rows_of(held)
    query, output = torch.randn(2, PLACES * ROWS, HEADS, DIM).unbind(0)
    for step in STEPS:
        requests = [
            StepRequest(ROWS * r, ROWS * r, ROWS * (r + 1), context, parents and tree_of(parents))
            for r, (context, parents) in enumerate(step)
        ]
        backend.attach({"a": SimpleNamespace()}, TreeStep(requests), common)
        query.copy_(torch.randn_like(query))
        output.fill_(7.0)
        captured.attend(query, cache, output, DIM**-0.5)
        keys, values = gpu_cache_views(cache)
        for r, (context, parents) in enumerate(step):
            slots = [(int(table[r, s // PAGE]), s % PAGE) for s in range(context + ROWS)]
            key, value = (torch.stack([half[at] for at in slots]) for half in (keys, values))
            line = list(range(-1, ROWS - 2))
            for row in range(ROWS):
                seen = path_of(np.array(line if parents is None else parents), row)
                shown = [*range(context), *(context + j for j in seen)]
                at = ROWS * r + row
                expected = chain_attention(query[at], key[shown], value[shown], DIM**-0.5)
                assert (output[at].double() - expected).abs().max() < 1e-5, (step, r, row)
        assert (output[ROWS * len(step) :] == 7.0).all(), "rows of no request were written"
