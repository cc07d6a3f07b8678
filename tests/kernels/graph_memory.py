# SPDX-License-Identifier: Apache-2.0
"""A small device for tests of graphs: its sizes, what is left in memory between steps, and whether
drafts are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vllm_specplug.drafting.device_requests import DeviceTrees

CPU = torch.device("cpu")
PAGE, HEADS, KV_HEADS, DIM, NODES, REQUESTS, BLOCKS, VOCAB = 16, 2, 1, 16, 10, 4, 5, 30
CONTEXT = PAGE * BLOCKS


def config(sizes: list[int]) -> Any:
    """What vLLM's manager of graphs reads of its config."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=sizes[-1]),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        model_config=SimpleNamespace(max_model_len=CONTEXT),
        speculative_config=None,
    )


def garbage(*tensors: torch.Tensor) -> None:
    """NaN, and numbers that are the index of nothing."""
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)


def same_trees(a: DeviceTrees, b: DeviceTrees, atol: float) -> bool:
    """`atol`: of scores, which round differently in products of more rows."""
    if a.counts.tolist() != b.counts.tolist():
        return False
    for r, n in enumerate(a.counts.tolist()):
        for name in ("token_ids", "parents", "depths"):
            if not torch.equal(getattr(a, name)[r, :n], getattr(b, name)[r, :n]):
                return False
        if not torch.allclose(a.scores[r, :n], b.scores[r, :n], atol=atol):
            return False
    return True
