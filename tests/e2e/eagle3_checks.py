# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads under vLLM's own method and as trees of one branch: the same drafts, token for
token. Run by tests/e2e/test_eagle3_tree.py."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from tests.e2e.pair import (
    core_of,
    generate,
    head_options,
    make_engine,
    sequences_of,
    target,
    watch_preemptions,
    watch_prefix_hits,
)
from tests.e2e.tiny import make_eagle3_head
from vllm_specplug.tree import DraftTree

DEPTH = 3
CHAIN = {"num_speculative_tokens": DEPTH, "tree_budget": DEPTH, "tree_width": 1}
PROMPTS = [[3 + (5 * i * i + k) % 60 for i in range(8 + 9 * k)] for k in range(4)]
LONG = [3 + (7 * i * i + 3 * i) % 60 for i in range(101)]


def drafts_of(llm: Any, prompts: list[list[int]]) -> tuple[dict[Any, list[int]], list[Any]]:
    """Drafts of each step by the tokens before them, as they are scheduled, and the outputs."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
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
        outputs = generate(llm, prompts, params)
    finally:
        scheduler.schedule = original
    return seen, outputs


def _engines(**engine: Any) -> tuple[Any, Any]:
    own = {"method": "eagle3", "num_speculative_tokens": DEPTH, **head_options("eagle3_tree")}
    engine = {"async_scheduling": False, **engine}
    chains = make_engine(None, speculative_config=own, **engine)
    return chains, make_engine("eagle3_tree", speculative=CHAIN, **engine)


def compare_drafts(engines: tuple[Any, Any], prompts: list[list[int]]) -> int:
    """Fails unless the drafts are the same at every place; returns how many there were."""
    (own, plain), (ours, drafted) = (drafts_of(llm, prompts) for llm in engines)
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
    scheduler = core_of(llm).scheduler
    preempted = []
    original = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **kwargs: (
        preempted.append(args[0].request_id),
        original(*args, **kwargs),
    )[1]
    mixed, _ = drafts_of(llm, [LONG, *PROMPTS])
    assert preempted
    common = set(alone) & set(mixed)
    assert len(common) > 10, (len(common), len(alone), len(mixed))
    for known in common:
        count = min(len(alone[known]), len(mixed[known]))
        assert alone[known][:count] == mixed[known][:count], len(known)


class Drafts:
    """What an engine's drafter drafts in every `every`th step, by the tokens before it, and how
    many tokens' keys and values it computed at once."""

    def __init__(self, llm: Any, every: int = 1) -> None:
        runner = core_of(llm).model_executor.driver_worker.worker.model_runner
        owner = getattr(runner, "speculator", None)
        drafter = runner.drafter.drafter if owner is None else owner.proposer.drafter
        self.seen: dict[tuple[int, ...], list[int]] = {}
        self.written: list[int] = []
        propose, write, steps = drafter.propose, drafter.backlog._write, count()

        def draft(requests: Any) -> list[DraftTree]:
            if next(steps) % every:
                return [DraftTree.empty()] * len(requests)
            trees: list[DraftTree] = propose(requests)
            for tokens, tree in zip(requests.token_ids, trees, strict=True):
                self.seen[tuple(tokens.tolist())] = tree.token_ids.tolist()
            return trees

        def noted(outputs: Any, *columns: Any) -> None:
            self.written.append(len(outputs))
            write(outputs, *columns)

        drafter.propose, drafter.backlog._write = draft, noted


def compare_drafts_after_steps_without_any(**engine: Any) -> None:
    """What waits while nothing is drafted, through chunks, prefix hits and preemption: drafts are
    those of an engine that drafts in every step."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine = {"max_num_batched_tokens": 40, "enable_prefix_caching": True, **engine}
    llms = [
        make_engine("eagle3_tree", speculative=CHAIN, **engine, **more)
        for more in ({}, {"num_gpu_blocks_override": 9})
    ]
    always, seldom = Drafts(llms[0]), Drafts(llms[1], every=6)
    preempted, hits = watch_preemptions(llms[1]), watch_prefix_hits(llms[1])
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


def check_drafts_after_steps_without_any() -> None:
    compare_drafts_after_steps_without_any()


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
    own = {"method": "eagle3", "num_speculative_tokens": DEPTH, **options}
    engines = (
        make_engine(None, speculative_config=own, **engine),
        make_engine("eagle3_tree", speculative={**CHAIN, **options}, **engine),
    )
    assert compare_drafts(engines, PROMPTS) > 20
    assert compare_drafts(engines, [LONG]) > 5
