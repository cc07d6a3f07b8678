# SPDX-License-Identifier: Apache-2.0
"""Sessions whose input goes on after an answer, against plain decoding.

The trees hold what the target would say after the token that ends an answer, so that a walk which
went on there would find it.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import vllm
from packaging import version

from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Pair, both_schedulers, generate, scheduled
from tests.e2e.requests import PROMPTS, greedy, seeded
from tests.e2e.sessions import NEXT, Session, compare, compare_constrained
from vllm_specplug.vllm_v2.stop_tokens import StopTokens

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


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
        compare_constrained(made)
