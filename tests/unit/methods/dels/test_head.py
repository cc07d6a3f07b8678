# SPDX-License-Identifier: Apache-2.0
"""Local heads: no-op at the start, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.methods.dels.local_heads import KINDS, H, R, S, V
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig


@pytest.mark.parametrize("name", KINDS)
def test_a_new_head_scores_nothing(name: str) -> None:
    config = LocalHeadConfig(vocab_size=V, target_hidden_size=H, rank=R, **KINDS[name])
    table = LocalHead(config).output_table(torch.randn(V, H))
    assert table.shape == (V, R) and not table.any()


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
