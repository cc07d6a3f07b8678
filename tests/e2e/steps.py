# SPDX-License-Identifier: Apache-2.0
"""Pairs for steps of every method.

With SPECPLUG_INTERPRETED=1, to be set before vLLM is imported, both engines take vLLM's own
kernels, in Triton's interpreter.
"""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("SPECPLUG_INTERPRETED") == "1":
    from tests.e2e import interpreter

    interpreter.install()


from tests.e2e.pair import Counts, Pair, scheduled
from tests.e2e.requests import PROMPTS, greedy, seeded


def mixed() -> list[Any]:
    return [greedy(max_tokens=24), *(seeded(i, max_tokens=24) for i in range(3))]


def engines(
    method: str = "oracle", *, ahead: bool = True, model: str | None = None, **tree: Any
) -> Pair:
    """A pair with six nodes per tree at most. `model` takes the place of the method's own head,
    `tree` has engine arguments of the tree engine alone."""
    options = {"num_speculative_tokens": 6, "tree_budget": 6, "ngram_topk": 3}
    options |= {} if model is None else {"model": model}
    made = scheduled(ahead, method, speculative=options, tree=tree)
    assert type(made.runner).__mro__[2].__module__ == "vllm.v1.worker.cpu.model_runner"
    return made


def compare(method: str, ahead: bool, model: str | None = None) -> Counts:
    made = engines(method, ahead=ahead, model=model)
    _, counts = made.compare(PROMPTS[:4], mixed())
    # Steps that were prepared ahead, or none.
    assert (counts.stale > 0) == ahead, counts
    return counts
