# SPDX-License-Identifier: Apache-2.0
"""Chains of drafts beside those of vLLM's own methods."""

from __future__ import annotations

from typing import Any

from tests.e2e.pair import (
    changed,
    core_of,
    generate,
    make_engine,
    sequences_of,
    vllms_v1,
    watch_drafts,
)
from tests.e2e.requests import greedy

DEPTH = 3
CHAIN = {"num_speculative_tokens": DEPTH, "tree_budget": DEPTH, "tree_width": 1}
PROMPTS = [[3 + (5 * i * i + k) % 60 for i in range(8 + 9 * k)] for k in range(4)]
LONG = [3 + (7 * i * i + 3 * i) % 60 for i in range(101)]


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

    def scheduled(stock: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        for req_id, tokens in output.scheduled_spec_decode_tokens.items():
            seen[tuple(scheduler.requests[req_id].all_token_ids)] = list(tokens)
        return output

    with changed(scheduler, "schedule", scheduled):
        outputs = generate(llm, prompts, greedy(max_tokens=24))
    return seen, outputs


def drafts_of(llm: Any, prompts: list[list[int]]) -> tuple[dict[Any, list[int]], list[Any]]:
    """Drafts of a tree engine by the tokens before them, and the outputs."""
    with watch_drafts(llm) as seen:
        outputs = generate(llm, prompts, greedy(max_tokens=24))
    return {known: tokens for known, (tokens, *_) in seen.items()}, outputs


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


def compare_in_batches_and_after_hits(
    engines: tuple[Any, Any], prompts: list[list[int]] = PROMPTS, long: list[int] = LONG
) -> None:
    """`compare_drafts` of a batch, of a long prompt, and of one that hits blocks of the long one;
    the last block that is hit was followed by another token before."""
    assert compare_drafts(engines, prompts) > 20
    assert compare_drafts(engines, [long]) > 5
    assert compare_drafts(engines, [[*long[:96], 12, 3]]) > 5
