# SPDX-License-Identifier: Apache-2.0
"""Local heads: equations, no-op at the start, one step at a time equals a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.methods.dels.local_heads import KINDS, H, R, S, V, make
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig


@pytest.mark.parametrize("name", KINDS)
def test_steps_equal_the_sequence(name: str) -> None:
    head = make(name)
    embed, tokens = torch.randn(V, H), torch.randint(0, V, (3, 5))
    expected = head.ranks(tokens, embed)
    state = head.initial_state(3)
    for t in range(5):
        rank, state = head.step(tokens[:, t], state, embed)
        assert torch.allclose(rank, expected[:, t], atol=1e-5)
    assert expected.shape == (3, 5, R)
    # something depends on what was read before, except for Markov
    swapped = head.ranks(tokens[:, [1, 0, 2, 3, 4]], embed)
    same = torch.allclose(swapped[:, -1], expected[:, -1])
    assert same == name.startswith("markov")


@pytest.mark.parametrize("name", KINDS)
def test_a_new_head_scores_nothing(name: str) -> None:
    config = LocalHeadConfig(vocab_size=V, target_hidden_size=H, rank=R, **KINDS[name])
    head = LocalHead(config)
    scores = head(torch.randint(0, V, (2, 4)), torch.randn(V, H), torch.randn(V, H))
    assert scores.shape == (2, 4, V) and bool((scores == 0).all())
    # and yet it can learn: the output's gradient is not zero
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.zeros(8).long())
    loss.backward()
    out = head.low_rank_lm_head if hasattr(head, "low_rank_lm_head") else head.rank_to_hidden
    assert float(out.weight.grad.abs().max()) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "lstm"}, "kind = 'lstm', legal: one of"),
        ({"rank": 0}, "rank = 0, legal: an integer from 1 to"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"draft_vocab_size": V + 1}, f"legal: 1..{V}"),
        ({"kind": "markov", "hidden_size": 0, "input_size": 3}, "rank = 6 for kind 'markov'"),
        ({"kind": "gated", "hidden_size": 0}, "slot_size = 0, legal: an integer from 1 to"),
        ({"slot_size": -1}, "slot_size = -1, legal: .* or 0 for kinds 'gru' and 'markov'"),
        ({"rank_activation": "relu"}, "rank_activation = 'relu'"),
        ({"alpha": -0.1}, "alpha = -0.1, legal: numbers from 0 to 100"),
        ({"beta": [0.1, float("nan")]}, "beta = .*, legal: numbers"),
        ({"alpha": True}, "alpha = True, legal: numbers"),
        ({"beta": 10**400}, "beta = 1000"),
        ({"beta": "much"}, "beta = 'much', legal: numbers"),
    ],
)
def test_bad_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    options = {"kind": "gru", "hidden_size": S, "vocab_size": V, "target_hidden_size": H, "rank": R}
    with pytest.raises(ValueError, match=message):
        LocalHeadConfig(**{**options, **changes})
