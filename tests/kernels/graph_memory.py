# SPDX-License-Identifier: Apache-2.0
"""A small device for tests of graphs: its sizes, and what is left in memory between steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

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
