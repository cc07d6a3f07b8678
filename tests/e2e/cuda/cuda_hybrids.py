# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines on trees over recurrent states as on CUDA; they need fixture `device_states`."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.e2e import vision
from tests.e2e.cuda import cuda_device, cuda_pairs
from tests.e2e.hybrids import ROPE_ON_AXES, make_hybrid_target
from tests.e2e.pair import Counts, Pair
from tests.e2e.requests import greedy, seeded

VOCAB = 300


@cache
def target(family: str | None = None, **config: Any) -> str:
    if family is None:
        family = "Qwen3Next" if cuda_device.has_experts() else "Qwen3_5Text"
    folder = Path(tempfile.mkdtemp(prefix="specplug-hybrid-")) / family
    if family == "Qwen3_5Text":
        vision.have_torchvision()
        config["rope_parameters"] = ROPE_ON_AXES
    return str(make_hybrid_target(folder, family, VOCAB, **config))


def engines(*, ahead: bool, model: str | None = None, **options: Any) -> Pair:
    engine = {
        "model": model or target(),
        "skip_tokenizer_init": True,
        **cuda_device.state_arguments(),
    }
    return cuda_pairs.engines(ahead=ahead, target=engine, **options)


def compared(made: Pair, **options: Any) -> Counts:
    """Greedy and seeded, drafted for and not; one prompt comes in pieces beside requests that
    decode."""
    params = [
        greedy(max_tokens=14, detokenize=False),
        seeded(1, max_tokens=16, detokenize=False),
        greedy(max_tokens=10, detokenize=False),
        seeded(2, max_tokens=9, detokenize=False),
    ]
    params[2].extra_args = {"specplug_tree_budget": 0}
    prompts = [*cuda_pairs.PROMPTS, [4, 3, 2, 1]]
    return made.compare(prompts, params, **options)[1]
