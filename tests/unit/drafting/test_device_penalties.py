# SPDX-License-Identifier: Apache-2.0
"""Penalties of drafts on a device against those of the host."""

from __future__ import annotations

import functools

import pytest
import torch

from vllm_specplug.drafting.device_requests import DevicePenalties
from vllm_specplug.drafting.requests import DraftPenalty
from vllm_specplug.tree.contextual_penalty import penalise


@pytest.mark.parametrize("is_reduced", [False, True])
def test_penalties_are_those_of_the_host(is_reduced: bool) -> None:
    """Requests from the second one on; token 0 is recent in one of them, and one has no penalty."""
    vocab, theta = 12, 1.3
    recent = [[3], [0, 5, 5, 11], [7, 2], [], [40, 1]]
    thetas = [2.0, theta, theta, 1.0, theta]
    draft_ids = None
    if is_reduced:
        draft_ids = torch.full((vocab,), -1)
        draft_ids[torch.tensor([0, 2, 5, 6])] = torch.arange(4)
    columns = 4 if is_reduced else vocab
    table = torch.full((5, 4), -1)
    for r, tokens in enumerate(recent):
        table[r, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    logits = torch.randn(4, 3, columns, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for r, tokens in enumerate(recent[1:]):
        kept = torch.tensor(sorted({t for t in tokens if t < vocab}), dtype=torch.int64)
        if draft_ids is not None:
            kept = draft_ids[kept]
            kept = kept[kept >= 0]
        apply = functools.partial(penalise, theta=thetas[r + 1])
        DraftPenalty(kept, apply).apply(expected[r], kept)
    assert not torch.equal(logits, expected)
    DevicePenalties(table, torch.tensor(thetas)).apply(logits, 1, draft_ids)
    torch.testing.assert_close(logits, expected)
