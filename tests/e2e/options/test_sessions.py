# SPDX-License-Identifier: Apache-2.0
"""Sessions whose input goes on after an answer, against plain decoding.

The trees hold what the target would say after the token that ends an answer, so that a walk which
went on there would find it.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import vllm
from packaging import version

from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Counts, Pair, both_schedulers, core_of, generate, scheduled
from tests.e2e.requests import PROMPTS, greedy, seeded
from vllm_specplug.vllm_v2.stop_tokens import StopTokens

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

NEXT = [[9, 30, 31, 32], [33, 34, 35], [36, 37]]
# Turns, and the sampling parameters of each.
Session = tuple[list[list[int]], list[Any]]


def run_session(llm: Any, name: str, turns: list[list[int]], params: list[Any]) -> list[list[int]]:
    """Tokens of every turn's answer."""
    from vllm.v1.request import Request

    core = core_of(llm)
    answers: list[list[int]] = [[]]
    for turn, of_turn in zip([*turns, [0]], [*params, params[-1]], strict=True):
        is_last = turn == [0]
        request = Request(name, list(turn), of_turn, None, resumable=not is_last)
        if request.use_structured_output:
            core.structured_output_manager.grammar_init(request)
        core.scheduler.add_request(request)
    while core.scheduler.has_unfinished_requests():
        outputs, executed = core.step_fn()
        core.post_step(model_executed=executed)
        for output in (outputs or {}).get(0, _Empty).outputs:
            answers[-1] += output.new_token_ids
            # What vLLM says of an earlier turn's end stays with the request.
            ends = params[min(len(answers), len(params)) - 1]
            if answers[-1][-1] in ends.stop_token_ids or len(answers[-1]) == ends.max_tokens:
                answers.append([])
    return [answer for answer in answers if answer]


class _Empty:
    outputs: tuple[Any, ...] = ()


def constrained_sessions() -> list[Session]:
    """vLLM keeps the grammar of the first turn and ignores later turns' parameters."""
    from vllm.sampling_params import StructuredOutputsParams

    # What is legal depends on how far a path has come.
    grammar = StructuredOutputsParams(regex="(([a-z]{2}|[0-9]) ){40}")
    grammar._backend = "xgrammar"  # what vLLM's front end would have chosen
    found = []
    for i, prompt in enumerate(PROMPTS):
        make = greedy if i % 2 else lambda **options: seeded(7, **options)
        first = make(max_tokens=9, stop_token_ids=[], structured_outputs=grammar)
        found.append(([prompt, *NEXT], [first, *[make(max_tokens=24, stop_token_ids=[])] * 3]))
    return found


def compare(made: Pair, found: list[Session]) -> Counts:
    total = Counts()
    for i, (turns, params) in enumerate(found):
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
        total.branching += counts.branching
    assert total.accepted > 20, total
    return total


def sessions(made: Pair) -> list[Session]:
    """Turns and their sampling parameters; answers end inside what the target would say."""
    found = []
    for i, prompt in enumerate(PROMPTS):
        make = greedy if i % 2 else lambda **options: seeded(7, **options)
        spoken = list(generate(made.plain, [prompt], make(max_tokens=24))[0].outputs[0].token_ids)
        end = next(n for n in range(5, 24) if spoken[n] not in spoken[:n])
        params = make(max_tokens=24, stop_token_ids=[spoken[end]])
        found.append(([prompt, *NEXT], [params] * (1 + len(NEXT))))
        OracleDrafter.sequences.append([*prompt, *spoken])
    return found


def test_turns_after_an_answer_ended_inside_a_tree() -> None:
    for made in both_schedulers():
        OracleDrafter.sequences = []
        counts = compare(made, sessions(made))
        assert (counts.stale > 0) == made.is_ahead, counts


@pytest.mark.skipif(
    version.parse(vllm.__version__) >= version.parse("0.33"),
    reason="vLLM 0.33 does not count tokens behind the end of an answer as computed",
)
def test_walks_past_the_end_of_an_answer_differ() -> None:
    made = scheduled(False)
    OracleDrafter.sequences = []
    with (
        patch.object(StopTokens, "mask_after_stop", lambda self, trees, token_ids: trees),
        pytest.raises(AssertionError, match="differs"),
    ):
        compare(made, sessions(made))


def test_a_grammar_outlives_the_turn_that_asked_for_it() -> None:
    """vLLM follows the grammar of a session's first turn to its end."""
    for made in both_schedulers():
        OracleDrafter.sequences = []
        with patch.object(OracleDrafter, "decoys_from_answer", True):
            counts = compare(made, constrained_sessions())
        assert counts.branching > 10, counts
