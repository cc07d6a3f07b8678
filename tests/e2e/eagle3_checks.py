# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads under vLLM's own method and as trees of one branch: the same drafts, token for
token. Run by tests/e2e/test_eagle3_tree.py."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from tests.e2e.option_checks import greedy
from tests.e2e.pair import (
    core_of,
    generate,
    head_options,
    make_engine,
    sequences_of,
    target,
    vllms_v1,
    watch_preemptions,
    watch_prefix_hits,
)
from tests.e2e.tiny import make_eagle3_head
from vllm_specplug.tree import DraftTree

DEPTH = 3
CHAIN = {"num_speculative_tokens": DEPTH, "tree_budget": DEPTH, "tree_width": 1}
PROMPTS = [[3 + (5 * i * i + k) % 60 for i in range(8 + 9 * k)] for k in range(4)]
LONG = [3 + (7 * i * i + 3 * i) % 60 for i in range(101)]


class Drafts:
    """What an engine's drafter drafts in every `every`th step while entered, by the tokens before
    it, and how many tokens' keys and values it computed at once."""

    def __init__(self, llm: Any, every: int = 1) -> None:
        runner = core_of(llm).model_executor.driver_worker.worker.model_runner
        self.drafter, self.every = runner.drafter.drafter, every
        self.seen: dict[tuple[int, ...], list[int]] = {}
        self.written: list[int] = []

    def __enter__(self) -> Drafts:
        drafter, steps = self.drafter, count()
        self.stock = propose, write = drafter.propose, drafter.backlog._write

        def draft(requests: Any) -> list[DraftTree]:
            if next(steps) % self.every:
                return [DraftTree.empty()] * len(requests)
            trees: list[DraftTree] = propose(requests)
            for tokens, tree in zip(requests.token_ids, trees, strict=True):
                self.seen[tuple(tokens.tolist())] = tree.token_ids.tolist()
            return trees

        def noted(outputs: Any, *columns: Any) -> None:
            self.written.append(len(outputs))
            write(outputs, *columns)

        drafter.propose, drafter.backlog._write = draft, noted
        return self

    def __exit__(self, *args: Any) -> None:
        self.drafter.propose, self.drafter.backlog._write = self.stock


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


def _engines(**engine: Any) -> tuple[Any, Any]:
    engine = {"async_scheduling": False, **engine}
    chains = own_engine("eagle3", speculative=head_options("eagle3_tree"), **engine)
    return chains, make_engine("eagle3_tree", speculative=CHAIN, **engine)


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


def check_the_same_drafts_in_a_batch_and_after_prefix_hits() -> None:
    """The last block that is hit was followed by another token before."""
    engines = _engines(enable_prefix_caching=True)
    assert compare_drafts(engines, PROMPTS) > 20
    assert compare_drafts(engines, [LONG]) > 5
    hits = watch_prefix_hits(engines[1])
    assert compare_drafts(engines, [[*LONG[:96], 62, 3]]) > 5
    # Three blocks are there, and the last one is computed again.
    assert list(hits.values()) == [64]


def check_chunks_and_preemption_leave_the_drafts() -> None:
    """Drafts depend on the tokens before them alone. (With vLLM's own method they also depend on
    where a prompt was cut, so this compares with prompts that were not.)"""
    # Chains: the order of a tree's nodes follows rounding where their scores are close.
    llm = make_engine(
        "eagle3_tree", speculative=CHAIN, max_num_batched_tokens=40, num_gpu_blocks_override=9
    )
    alone: dict[Any, list[int]] = {}
    for prompt in PROMPTS:
        alone.update(drafts_of(llm, [prompt])[0])
    preempted = watch_preemptions(llm)
    mixed, _ = drafts_of(llm, [LONG, *PROMPTS])
    assert preempted
    common = set(alone) & set(mixed)
    assert len(common) > 10, (len(common), len(alone), len(mixed))
    for known in common:
        count = min(len(alone[known]), len(mixed[known]))
        assert alone[known][:count] == mixed[known][:count], len(known)


def check_drafts_after_steps_without_any() -> None:
    """What waits while nothing is drafted, through chunks, prefix hits and preemption: drafts are
    those of an engine that drafts in every step."""
    params = greedy(max_tokens=40)
    engine = {"max_num_batched_tokens": 40, "enable_prefix_caching": True}
    llms = [
        make_engine("eagle3_tree", speculative=CHAIN, **engine, **more)
        for more in ({}, {"num_gpu_blocks_override": 9})
    ]
    preempted, hits = watch_preemptions(llms[1]), watch_prefix_hits(llms[1])
    with Drafts(llms[0]) as always, Drafts(llms[1], every=6) as seldom:
        # The last two alone, so that what they share is still there.
        for prompts in ([LONG, *PROMPTS], [LONG], [[*LONG[:96], 62, 3]]):
            expected, found = (sequences_of(generate(llm, prompts, params)) for llm in llms)
            assert expected == found
    assert preempted and any(hits.values()), (preempted, hits)
    common = set(always.seen) & set(seldom.seen)
    assert len(common) > 5, (len(common), len(seldom.seen))
    for known in common:
        assert always.seen[known] == seldom.seen[known], len(known)
    # Tokens of several steps went together.
    assert sum(1 for n in seldom.written if n > 2 * len(PROMPTS)) > 2, seldom.written


def check_a_head_of_other_heads_than_the_targets() -> None:
    """Its keys and values have pages of their own shape: the same drafts, and plain outputs. It has
    more KV heads than the target has query heads."""
    folder, vocab = (
        target().parent / "eagle3_other",
        json.loads((target() / "config.json").read_text())["vocab_size"],
    )
    head = make_eagle3_head(
        folder, vocab, draft_vocab_size=vocab - 40, num_heads=8, num_kv_heads=4, head_dim=64
    )
    options = {"model": str(head)}
    engine = {"async_scheduling": False, "enable_prefix_caching": True}
    engines = (
        own_engine("eagle3", speculative=options, **engine),
        make_engine("eagle3_tree", speculative={**CHAIN, **options}, **engine),
    )
    assert compare_drafts(engines, PROMPTS) > 20
    assert compare_drafts(engines, [LONG]) > 5
