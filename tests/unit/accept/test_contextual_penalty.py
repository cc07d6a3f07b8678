# SPDX-License-Identifier: Apache-2.0
"""The contextual penalty on single rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specplug.tree.contextual_penalty import (
    RecentTokens,
    penalise,
    penalise_where,
    recent_tokens,
)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (0, []),
        (2, [8, 9]),
        (3, [7, 8, 9]),
        (4, [3, 7, 8, 9]),
        (100, [1, 2, 3, 7, 8, 9]),
    ],
)
def test_the_window_reaches_back_from_the_newest_token_into_the_prompt(window, expected) -> None:
    assert recent_tokens([1, 2, 2, 3], [7, 9, 8], window) == expected


def test_a_token_counts_once_and_placeholders_do_not() -> None:
    assert recent_tokens([5, 5], [5, 6, -1], 10) == [5, 6]
    assert recent_tokens((), [], 10) == []


TOKENS = st.lists(st.integers(-1, 12), max_size=20)


@given(TOKENS, st.lists(st.tuples(st.integers(0, 6), TOKENS), max_size=8), st.integers(0, 25))
def test_counts_that_slide_give_what_a_look_at_the_whole_window_gives(
    prompt, edits, window
) -> None:
    output: list[int] = []
    recent = RecentTokens(prompt, output, window)
    for taken_back, added in edits:
        del output[max(0, len(output) - taken_back) :]
        output += added
        # Tokens 10 to 12 have no logit.
        expected = [token for token in recent_tokens(prompt, output, window) if token < 10]
        mask = recent.mask(10, torch.device("cpu"))
        assert mask.nonzero()[:, 0].tolist() == recent.token_ids().tolist() == expected
        logits, other = torch.randn(2, 10).unbind()
        other.copy_(logits)
        penalise(logits, torch.tensor(expected, dtype=torch.int64), 1.3)
        penalise_where(other, mask, 1.3)
        assert torch.equal(logits, other)


def test_a_long_window_costs_what_changes() -> None:
    prompt, output = list(range(100_000)) * 2, [1]
    recent = RecentTokens(prompt, output, 150_000)
    recent.mask(100_000, torch.device("cpu"))
    looked_at = 0

    class Counted(dict):
        def get(self, *args):
            nonlocal looked_at
            looked_at += 1
            return super().get(*args)

    recent._counts = Counted(recent._counts)
    for token in range(100):
        output.append(token)
        recent.mask(100_000, torch.device("cpu"))
    assert looked_at == 200  # one token comes, one goes


def test_positive_logits_are_divided_and_others_multiplied() -> None:
    logits = torch.tensor([3.0, -3.0, 0.0, 3.0, -3.0])
    penalise(logits, torch.tensor([0, 1, 2]), 1.5)
    assert logits.tolist() == pytest.approx([2.0, -4.5, 0.0, 3.0, -3.0])


def test_every_depth_of_a_draft_is_penalised_alike() -> None:
    logits = torch.randn(4, 10)
    expected = logits.clone()
    for row in expected:
        penalise(row, torch.tensor([1, 7]), 1.2)
    penalise(logits, torch.tensor([1, 7]), 1.2)
    assert torch.equal(logits, expected)


def test_the_temperature_may_come_before_or_after() -> None:
    logits, tokens = torch.randn(50), torch.arange(0, 50, 3)
    before, after = logits / 0.7, logits.clone()
    penalise(before, tokens, 1.3)
    penalise(after, tokens, 1.3)
    torch.testing.assert_close(before, after / 0.7)
