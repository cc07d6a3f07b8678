# SPDX-License-Identifier: Apache-2.0
"""Sessions whose input goes on after an answer, on trees of the V2 runner; see test_v2_inputs.py.

The trees hold what the target would say after the token that ends an answer, so that a walk which
went on there would find it.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.option_checks import PROMPTS, greedy, seeded
from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Counts, Pair, core_of, generate, pair
from tests.e2e.v2_setup import use_v2
from vllm_specplug.vllm_v2.stop_tokens import StopTokens

use_v2()

NEXT = [[9, 30, 31, 32], [33, 34, 35], [36, 37]]


def engines(*, ahead: bool) -> Pair:
    return pair(tree={"async_scheduling": ahead})


def run_session(llm: Any, name: str, turns: list[list[int]], params: Any) -> list[list[int]]:
    """Tokens of every turn's answer."""
    from vllm.v1.request import Request

    core = core_of(llm)
    answers: list[list[int]] = [[]]
    for turn in turns:
        core.scheduler.add_request(Request(name, list(turn), params, None, resumable=True))
    core.scheduler.add_request(Request(name, [0], params, None, resumable=False))
    while core.scheduler.has_unfinished_requests():
        outputs, executed = core.step_fn()
        core.post_step(model_executed=executed)
        for output in (outputs or {}).get(0, _Empty).outputs:
            answers[-1] += output.new_token_ids
            # What vLLM says of an earlier turn's end stays with the request.
            if answers[-1][-1] in params.stop_token_ids or len(answers[-1]) == params.max_tokens:
                answers.append([])
    return [answer for answer in answers if answer]


class _Empty:
    outputs: tuple[Any, ...] = ()


def sessions(made: Pair) -> list[tuple[list[list[int]], Any]]:
    """Turns and sampling parameters; answers end inside what the target would say."""
    found = []
    for i, prompt in enumerate(PROMPTS):
        make = greedy if i % 2 else lambda **options: seeded(7, **options)
        spoken = list(generate(made.plain, [prompt], make(max_tokens=24))[0].outputs[0].token_ids)
        end = next(n for n in range(5, 24) if spoken[n] not in spoken[:n])
        params = make(max_tokens=24, stop_token_ids=[spoken[end]])
        found.append(([prompt, *NEXT], params))
        OracleDrafter.sequences.append([*prompt, *spoken])
    return found


def compare(made: Pair) -> Counts:
    OracleDrafter.sequences = []
    total = Counts()
    for i, (turns, params) in enumerate(sessions(made)):
        expected = run_session(made.plain, f"plain-{i}", turns, params)
        assert len(expected) == len(turns), expected
        text: list[int] = []
        for turn, answer in zip(turns, expected, strict=True):
            # A turn's last token is dropped when the input goes on.
            text = [*text, *turn, *answer]
            OracleDrafter.sequences.append(list(text))
            text.pop()
        made.take_counts()
        answers = run_session(made.tree, f"tree-{i}", turns, params)
        counts = made.take_counts()
        assert answers == expected, f"session {i} differs: {answers} != {expected}"
        total.accepted += counts.accepted
        total.stale += counts.stale
    assert total.accepted > 20, total
    return total


def check_turns_after_an_answer_ended_inside_a_tree() -> None:
    for ahead in (False, True):
        counts = compare(engines(ahead=ahead))
        assert (counts.stale > 0) == ahead, counts


def check_walks_past_the_end_of_an_answer_differ() -> None:
    made = engines(ahead=False)
    with (
        patch.object(StopTokens, "within", lambda self, trees, token_ids: trees),
        pytest.raises(AssertionError, match="differs"),
    ):
        compare(made)
