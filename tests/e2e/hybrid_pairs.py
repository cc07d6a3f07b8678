# SPDX-License-Identifier: Apache-2.0
"""Pairs on targets with recurrent states."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.e2e.families import WINDOW_PROMPTS
from tests.e2e.hybrids import make_hybrid_target
from tests.e2e.pair import Counts, Pair, pair
from tests.e2e.requests import mixed_params
from vllm_specplug.vllm_attention.state_rows import StateStep

VOCAB = 300
# Prompts come in chunks, and there are fewer rows than all trees want.
CHUNKS = {"max_num_batched_tokens": 64}
ENGINE: dict[str, Any] = {"skip_tokenizer_init": True, **CHUNKS}
SPECULATIVE = {"num_speculative_tokens": 8, "tree_budget": 8}


@cache
def target(family: str = "Qwen3Next", **config: Any) -> str:
    folder = Path(tempfile.mkdtemp(prefix="specplug-hybrid-")) / family
    return str(make_hybrid_target(folder, family, VOCAB, **config))


def engines(method: str = "oracle", **options: Any) -> Pair:
    speculative = {**SPECULATIVE, **options.pop("speculative", {})}
    return pair(method, **{"model": target(), **ENGINE, **options}, speculative=speculative)


def compared(made: Pair, **options: Any) -> Counts:
    return made.compare(WINDOW_PROMPTS, mixed_params(8), **options)[1]


def _is_a_line(stock: Any, step: Any, requests: Any, parents: torch.Tensor) -> None:
    stock(step, requests, torch.where(parents < 0, -1, torch.arange(len(parents)) - 1))


def _by_place(stock: Any, step: Any, last_rows: torch.Tensor, *rest: Any) -> None:
    """As many rows as were accepted, but the first ones."""
    places = []
    for start, row in zip(step.starts.tolist(), last_rows.tolist(), strict=False):
        depth = 0
        while step.parents[row] >= 0:
            row, depth = int(step.parents[row]), depth + 1
        places.append(start + depth)
    stock(step, torch.tensor(places), *rest)


# Arguments of `changed`: what trees and commits must not be; either shows in the output.
WRONG: list[tuple[type, str, Callable[..., Any]]] = [
    (StateStep, "__init__", _is_a_line),
    (StateStep, "commit", _by_place),
]
