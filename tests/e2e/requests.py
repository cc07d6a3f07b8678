# SPDX-License-Identifier: Apache-2.0
"""Prompts and sampling parameters that many tests share."""

from __future__ import annotations

from itertools import cycle
from typing import Any

PROMPTS = [[7, 40, 41], [60, 61, 62, 63], [100, 9], [270, 280, 290, 11, 12]]
LONG = [list(range(20 + i, 90 + i)) for i in range(10)]
CUSTOM = ["tests.e2e.processors:AlternateRows", "tests.e2e.processors:ForbidHistory"]
THINK_START, THINK_END = 2, 3


def greedy(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, **options})


def seeded(seed: int, **options: Any) -> Any:
    return greedy(**{"temperature": 0.9, "seed": seed, **options})


def mixed_params(count: int) -> list[Any]:
    """Greedy and seeded in turn, ending at different steps; the fourth is not drafted for."""
    params = [
        make(max_tokens=24 + 3 * i, detokenize=False)
        for i, make in zip(range(count), cycle([greedy, lambda **kw: seeded(1, **kw)]))
    ]
    params[3].extra_args = {"specplug_tree_budget": 0}
    return params
