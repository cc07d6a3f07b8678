# SPDX-License-Identifier: Apache-2.0
"""Chains of drafts beside those of vLLM's own methods."""

from __future__ import annotations

from itertools import count
from typing import Any

from tests.e2e.pair import core_of, generate, make_engine, sequences_of, vllms_v1
from tests.e2e.requests import greedy
from vllm_specplug.tree import DraftTree

DEPTH = 3
CHAIN = {"num_speculative_tokens": DEPTH, "tree_budget": DEPTH, "tree_width": 1}
PROMPTS = [[3 + (5 * i * i + k) % 60 for i in range(8 + 9 * k)] for k in range(4)]
LONG = [3 + (7 * i * i + 3 * i) % 60 for i in range(101)]


class Drafts:
    """What an engine's drafter drafts in every `every`th step while entered, by the tokens before
    it."""

    def __init__(self, llm: Any, every: int = 1) -> None:
        runner = core_of(llm).model_executor.driver_worker.worker.model_runner
        self.drafter, self.every = runner.drafter.drafter, every
        self.seen: dict[tuple[int, ...], list[int]] = {}

    def __enter__(self) -> Drafts:
        drafter, steps = self.drafter, count()
        self.stock = propose = drafter.propose

        def draft(requests: Any) -> list[DraftTree]:
            if next(steps) % self.every:
                return [DraftTree.empty()] * len(requests)
            trees: list[DraftTree] = propose(requests)
            for tokens, tree in zip(requests.token_ids, trees, strict=True):
                self.seen[tuple(tokens.tolist())] = tree.token_ids.tolist()
            return trees

        drafter.propose = draft
        return self

    def __exit__(self, *args: Any) -> None:
        self.drafter.propose = self.stock


def own_engine(method: str, **engine: Any) -> Any:
    """One with vLLM's own `method`, on vLLM's V1 model runner: on a CPU without Triton its V2 has
    no kernels to draft with."""
    own = {"method": method, "num_speculative_tokens": DEPTH, **engine.pop("speculative", {})}
    with vllms_v1():
        return make_engine(None, speculative_config=own, **engine)


def own_drafts(llm: Any, prompts: list[list[int]]) -> tuple[dict[Any, list[int]], list[Any]]:
    """Drafts of `own_engine` by the tokens before them, as they are scheduled, and the outputs."""
    scheduler = core_of(llm).scheduler
    seen: dict[Any, list[int]] = {}
    original = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        for req_id, tokens in output.scheduled_spec_decode_tokens.items():
            request = scheduler.requests[req_id]
            known = tuple(request.all_token_ids)
            seen[known] = list(tokens)
        return output

    scheduler.schedule = schedule
    try:
        outputs = generate(llm, prompts, greedy(max_tokens=24))
    finally:
        scheduler.schedule = original
    return seen, outputs


def drafts_of(llm: Any, prompts: list[list[int]]) -> tuple[dict[Any, list[int]], list[Any]]:
    """Drafts of a tree engine by the tokens before them, and the outputs."""
    with Drafts(llm) as drafts:
        outputs = generate(llm, prompts, greedy(max_tokens=24))
    return drafts.seen, outputs


def compare_drafts(engines: tuple[Any, Any], prompts: list[list[int]]) -> int:
    """Fails unless the drafts are the same at every place; returns how many there were.

    Args:
        engines: one of `own_engine` and one with trees.
    """
    own, plain = own_drafts(engines[0], prompts)
    ours, drafted = drafts_of(engines[1], prompts)
    assert sequences_of(plain) == sequences_of(drafted)
    common = set(own) & set(ours)
    assert len(common) > len(ours) / 2, (len(common), len(own), len(ours))
    # Near the end of a request fewer are drafted here than can be.
    other = {
        known: (ours[known], own[known])
        for known in common
        if ours[known] != own[known][: len(ours[known])]
    }
    assert not other, (len(common), {len(known): pair for known, pair in other.items()})
    return len(common)
