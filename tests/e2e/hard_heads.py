# SPDX-License-Identifier: Apache-2.0
"""Draft heads that are far too sure, or that compute no numbers, for tests.

`confident`: logits are scaled until distributions saturate and tie; n-gram branches are certain.
`broken`: logits of some rows are NaN or infinite, whole rows or single entries.
`nan_weights`: weights hold NaN, and with them what the head caches of the context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

KINDS = ("confident", "broken", "nan_weights")


def _confident(logits: torch.Tensor) -> torch.Tensor:
    scales = torch.tensor([30.0, 100.0, 1.0, 1e4]).repeat(-(-len(logits) // 4))
    return logits * scales[: len(logits), None].to(logits.dtype)


def _broken(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    logits[0::7] = math.nan
    logits[1::7, 5] = math.nan
    logits[2::7, 6] = math.inf
    logits[3::7] = -math.inf
    logits[4::7, 8:] = -math.inf
    return logits


def _certain(size: int, rank: int, length: int) -> np.ndarray:
    return np.zeros(length, np.float32)


@torch.inference_mode()
def change_head(drafter: Any, kind: str) -> None:
    """Makes the head of a loaded drafter one of `kind`."""
    if kind == "nan_weights":
        for part in (getattr(drafter, name, None) for name in ("head", "heads")):
            for name in ("hidden_norm", "input_norm"):
                if hasattr(part, name):
                    getattr(part, name).data[0] = math.nan
            for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
                parameter.data.flatten()[0] = math.nan
        if hasattr(drafter, "local_tree"):
            drafter.local_tree.weights.output_table[7] = math.nan
        return
    if hasattr(drafter, "lm_head"):
        inner, change = drafter.lm_head, {"confident": _confident, "broken": _broken}[kind]
        drafter.lm_head = lambda hidden: change(inner(hidden))
    if kind == "confident" and drafter.ngrams is not None:
        drafter.ngrams.statistics.scores = _certain


@contextmanager
def _changed(kind: str) -> Iterator[None]:
    import vllm_specplug.vllm_worker.proposer as proposer

    original = proposer.get_method

    def get_hard_method(name: str) -> Any:
        def make(plan: Any, options: Any) -> Any:
            drafter: Any = original(name).load_drafter(plan)(options)
            stock_load = drafter.load

            def load(target: Any) -> None:
                stock_load(target)
                change_head(drafter, kind)

            drafter.load = load
            return drafter

        return SimpleNamespace(load_drafter=lambda plan: partial(make, plan))

    proposer.get_method = get_hard_method
    try:
        yield
    finally:
        proposer.get_method = original


def hard_heads(kind: str) -> Any:
    """Tree engines built while entered have such heads; "" changes nothing."""
    assert kind in ("", *KINDS), kind
    return _changed(kind) if kind else nullcontext()
