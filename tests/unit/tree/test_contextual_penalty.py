# SPDX-License-Identifier: Apache-2.0
"""The contextual penalty on single rows."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.tree.contextual_penalty import penalise, recent_tokens


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


def test_positive_logits_are_divided_and_others_multiplied() -> None:
    logits = torch.tensor([3.0, -3.0, 0.0, 3.0, -3.0])
    penalise(logits, torch.tensor([0, 1, 2]), 1.5)
    assert logits.tolist() == pytest.approx([2.0, -4.5, 0.0, 3.0, -3.0])
