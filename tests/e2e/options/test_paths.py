# SPDX-License-Identifier: Apache-2.0
"""Options that depend on what a row's path holds, against plain decoding.

Decoys are tokens of the answer at other depths: what reads the wrong rows finds likely tokens
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Counts, Pair, both_schedulers, generate, scheduled
from tests.e2e.requests import CUSTOM, PROMPTS, THINK_END, THINK_START, greedy, seeded
from vllm_specplug.vllm_v2.tree_params import TreeThinkingBudget

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

OracleDrafter.decoys_from_answer = True

Params = Callable[[], list[Any]]


def each(made: Pair, prompts: list[list[int]], params: list[Any]) -> tuple[list[Any], Counts]:
    """Every prompt with every one of `params`, in one batch; drafts are accepted past others."""
    outputs, counts = made.compare(
        [p for p in prompts for _ in params], [one.clone() for _ in prompts for one in params]
    )
    assert counts.skipping > 0 and counts.accepted > 10, counts
    return outputs, counts


@contextmanager
def vllms_own_rows(made: Pair) -> Iterator[None]:
    """The sampler as vLLM builds it."""
    sampler = made.runner.sampler
    processors, thinking = list(sampler.logits_processors), sampler.thinking_budget_state
    sampler.logits_processors[:] = [getattr(p, "stock", p) for p in processors]
    sampler.thinking_budget_state = thinking.stock
    try:
        yield
    finally:
        sampler.logits_processors[:] = processors
        sampler.thinking_budget_state = thinking


def diverges(made: Pair, prompts: list[list[int]], params: list[Any]) -> None:
    """Fails unless the outputs differ."""
    failure = "the outputs are the same without what is tested here"
    try:
        each(made, prompts, params)
    except AssertionError as error:
        failure = str(error)
    assert "differs" in failure, failure


def both(prompts: list[list[int]], params: Params, **engine: Any) -> list[Any]:
    """Answers of the last pair; with vLLM's own rows they would be others."""
    outputs: list[Any] = []
    for made in both_schedulers(**engine):
        outputs, counts = each(made, prompts, params())
        assert (counts.stale > 0) == made.is_ahead, counts
        with vllms_own_rows(made):
            diverges(made, prompts, params())
    return outputs


def penalties() -> list[Any]:
    return [
        greedy(repetition_penalty=1.4), greedy(frequency_penalty=1.1), greedy(),
        seeded(3, presence_penalty=1.5, temperature=0.6),
        greedy(presence_penalty=-1.0, frequency_penalty=0.4, logprobs=2),
    ]  # fmt: skip


def test_penalties() -> None:
    both(PROMPTS, penalties)


def contextual(window: int, theta: float) -> dict[str, Any]:
    return {"extra_args": {"specplug_penalty": theta, "specplug_penalty_window": window}}


def contextual_penalties() -> list[Any]:
    return [
        greedy(**contextual(6, 1.6)), greedy(), greedy(**contextual(200, 1.2), logprobs=2),
        seeded(3, temperature=0.6, **contextual(20, 1.4)),
        greedy(presence_penalty=0.5, **contextual(12, 0.8)),
    ]  # fmt: skip


def test_contextual_penalties() -> None:
    outputs = both(PROMPTS, contextual_penalties)
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


def bad_words(made: Pair) -> list[Any]:
    """Three and four tokens in a row that the plain answers have: the token before a row's own is
    its parent's, and in vLLM's own rows that of the row above."""
    outputs, _ = each(made, PROMPTS, [greedy()])
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    params = [greedy(), greedy(), greedy(), seeded(2, temperature=0.3)]
    for param, ids in zip(params, answers, strict=True):
        # As vLLM would have them of the words' text.
        param._bad_words_token_ids = [
            ids[i : i + length] for length in (3, 4) for i in range(0, len(ids) - length, 2)
        ]
    return params


def test_bad_words() -> None:
    for made in both_schedulers():
        params = bad_words(made)
        words = [len(param.bad_words_token_ids) for param in params]
        assert min(words) > 10, words
        each(made, PROMPTS, params)
        with vllms_own_rows(made):
            diverges(made, PROMPTS, params)


THINKING = {"reasoning_start_str": "<think>", "reasoning_end_str": " ok</think>"}


def budgets() -> list[Any]:
    return [greedy(thinking_token_budget=budget) for budget in (0, 2, 5, 9, 14)]


def test_thinking_budget() -> None:
    thinking = [[*p, THINK_START] for p in PROMPTS]
    outputs = both(thinking, budgets, reasoning_config=THINKING)
    for i, output in enumerate(outputs):
        budget = budgets()[i % 5].thinking_token_budget
        assert THINK_END in output.outputs[0].token_ids[: budget + 6], (i, budget)


def processed() -> list[Any]:
    return [
        greedy(extra_args={"alternate": True}), greedy(),
        greedy(extra_args={"forbid": True, "force": [7, 44]}, logprobs=2),
        seeded(5, extra_args={"forbid": True, "alternate": True}, repetition_penalty=1.2),
        seeded(6, extra_args={"force": [5, 91]}, top_p=0.9, min_p=0.05),
    ]  # fmt: skip


def test_processors_of_others() -> None:
    for made in both_schedulers(logits_processors=CUSTOM):
        outputs, _ = each(made, PROMPTS, processed())
        ids = outputs[0].outputs[0].token_ids
        assert all((a + b) % 2 for a, b in zip(ids, ids[1:], strict=False))
        ids = outputs[2].outputs[0].token_ids
        assert ids[7] == 44 and len(set(ids[:7])) == 7
        # Alone: every tree is of a request that a processor changes.
        made.take_counts()
        generate(made.tree, PROMPTS, processed()[2])
        counts = made.take_counts()
        assert counts.accepted > 10 and counts.branching > 3, counts
        with vllms_own_rows(made):
            diverges(made, PROMPTS, processed())


def test_params_are_installed() -> None:
    assert isinstance(scheduled(False).runner.sampler.thinking_budget_state, TreeThinkingBudget)
