# SPDX-License-Identifier: Apache-2.0
"""Sampling and output options on trees against plain decoding.

Options that depend on what a request has generated are in test_paths.py as well.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import both_schedulers, core_of, generate, pair, sequences_of
from tests.e2e.requests import CUSTOM, PROMPTS, THINK_START, greedy, seeded

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]
EOS = 1


def compare(prompts: list[list[int]], params: Any, **engine: Any) -> list[Any]:
    """The plain outputs; raises unless trees give them, waiting for every step and ahead of it."""
    for made in both_schedulers(**engine):
        given = [one.clone() for one in params] if isinstance(params, list) else params
        outputs, counts = made.compare(prompts, given)
        assert (counts.stale > 0) == made.is_ahead, counts
    return outputs


def each_prompt(*params: Any, **engine: Any) -> list[Any]:
    """Every prompt with every one of `params`, in one batch."""
    return compare([p for p in PROMPTS for _ in params], [*params] * len(PROMPTS), **engine)


def test_end_of_text_at_every_offset() -> None:
    params = [greedy(ignore_eos=False, extra_args={"force": [k, EOS]}) for k in range(24)]
    outputs = compare([PROMPTS[0]] * len(params), params, logits_processors=CUSTOM)
    for k, output in enumerate(outputs):
        assert len(output.outputs[0].token_ids) <= k + 1


def test_stop_token_at_every_offset() -> None:
    for output in compare(PROMPTS, greedy()):
        ids = list(output.outputs[0].token_ids)
        params = [greedy(stop_token_ids=[token]) for token in ids[:24]]
        outputs = compare([output.prompt_token_ids] * len(params), params)
        for token, stopped in zip(ids, outputs, strict=False):
            expected = ids[: ids.index(token) + 1]
            assert list(stopped.outputs[0].token_ids) == expected
            assert stopped.outputs[0].finish_reason == "stop"


def test_stop_string_at_every_offset() -> None:
    for output in compare(PROMPTS[:2], greedy()):
        text = output.outputs[0].text
        params = [
            greedy(stop=[text[k : k + 1 + k % 3]], include_stop_str_in_output=k % 2 == 0)
            for k in range(0, min(len(text), 40), 2)
        ]
        outputs = compare([output.prompt_token_ids] * len(params), params)
        assert {o.outputs[0].finish_reason for o in outputs} == {"stop"}


def test_length_at_every_offset() -> None:
    params = [greedy(max_tokens=k) for k in range(1, 25)]
    outputs = compare([PROMPTS[1]] * len(params), params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 25))


def test_min_tokens_at_every_offset() -> None:
    full = generate(pair().plain, PROMPTS[:1], greedy())
    stop = [full[0].outputs[0].token_ids[0]]
    params = [greedy(stop_token_ids=stop, min_tokens=k) for k in range(20)]
    outputs = compare([PROMPTS[0]] * len(params), params)
    assert all(len(o.outputs[0].token_ids) >= k for k, o in enumerate(outputs))


def test_seeds_and_several_samples() -> None:
    outputs = each_prompt(
        seeded(1, n=3), seeded(2, n=2, top_p=0.8), greedy(), seeded(9, logprobs=2)
    )
    assert len({tuple(c.token_ids) for c in outputs[0].outputs}) > 1


def test_all_logprobs() -> None:
    outputs = compare(PROMPTS, greedy(logprobs=-1, max_tokens=12), max_logprobs=-1)
    vocabulary = core_of(pair().plain).vllm_config.model_config.get_vocab_size()
    assert len(outputs[0].outputs[0].logprobs[0]) == vocabulary


THINKING = {"reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}}


def test_thinking_that_starts_in_the_output() -> None:
    """Forced in, and then counted; test_paths.py has thinking that the prompt starts."""
    starts = [greedy(thinking_token_budget=k, logit_bias={THINK_START: 8.0}) for k in range(1, 6)]
    compare([PROMPTS[1]] * len(starts), starts, **THINKING)


def test_thinking_budgets_end_with_their_request() -> None:
    thinking = [[*p, THINK_START] for p in PROMPTS]
    for engines in both_schedulers(**THINKING):
        (alone,) = generate(engines.plain, thinking[1:2], greedy())
        OracleDrafter.sequences = sequences_of([alone])
        engines.take_counts()
        # The first request ends, and another one has its place.
        params = [greedy(thinking_token_budget=16, max_tokens=4), greedy()]
        _, moved = generate(engines.tree, thinking[:2], params)
        assert moved.outputs[0].token_ids == alone.outputs[0].token_ids
        (later,) = generate(engines.tree, thinking[1:2], greedy())
        assert later.outputs[0].token_ids == alone.outputs[0].token_ids
        counts = engines.take_counts()
        assert counts.accepted > 10 and counts.branching > 3, counts


def test_everything_at_once() -> None:
    for method in ("oracle", "jetspec"):
        each_prompt(
            greedy(logprobs=0, prompt_logprobs=4),
            greedy(logit_bias={44: 3.0}, presence_penalty=0.6),
            seeded(7, min_p=0.2, repetition_penalty=1.1, top_k=30, top_p=0.9),
            greedy(extra_args={"alternate": True}, logprobs=1),
            seeded(8, min_tokens=9, stop_token_ids=[81, 11, 340], frequency_penalty=0.9),
            greedy(bad_words=["cat", " over"], allowed_token_ids=list(range(6, 200)), logprobs=3),
            method=method,
            logits_processors=CUSTOM,
        )
