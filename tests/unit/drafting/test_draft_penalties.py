# SPDX-License-Identifier: Apache-2.0
"""Penalties of drafts against their definition."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.drafting.requests import DraftPenalties


@pytest.mark.parametrize("is_reduced", [False, True])
def test_penalties_are_those_of_the_definition(is_reduced: bool) -> None:
    """Requests from the second one on; token 0 is recent in one of them, and one has no penalty."""
    vocab = 12
    recent = [[3], [0, 5, 5, 11], [7, 2], [], [40, 1]]
    thetas = [2.0, 1.3, 1.3, 1.0, 1.3]
    columns = {token: token for token in range(vocab)}
    draft_ids = None
    if is_reduced:
        columns = {0: 0, 2: 1, 5: 2, 6: 3}
        draft_ids = torch.tensor([columns.get(token, -1) for token in range(vocab)])
    table = torch.full((5, 4), -1)
    for r, tokens in enumerate(recent):
        table[r, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    logits = torch.randn(4, 3, len(columns), generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for r, tokens in enumerate(recent[1:]):
        for column in {columns[token] for token in tokens if token in columns}:
            one = expected[r, :, column]
            theta = thetas[r + 1]
            expected[r, :, column] = torch.where(one > 0, one / theta, one * theta)
    assert not torch.equal(logits, expected)
    DraftPenalties(table, torch.tensor(thetas)).apply(logits, 1, draft_ids)
    torch.testing.assert_close(logits, expected)
