# SPDX-License-Identifier: Apache-2.0
"""Tokens of several steps at once are the same as those of one after the other."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplug.drafting.committed_tokens import CommitBuffer, CommittedTokens

LAYERS, HIDDEN = 2, 3


def _step(rows: list[int], num_rows: int, req_ids: list[str], seed: int) -> CommittedTokens:
    make = torch.Generator().manual_seed(seed)
    count = len(rows)
    return CommittedTokens(
        aux_hidden_states=[torch.randn(num_rows, HIDDEN, generator=make) for _ in range(LAYERS)],
        rows=torch.tensor(rows),
        positions=torch.arange(count) + 10 * seed,
        slots=torch.arange(count) + 100 * seed,
        last_rows=torch.tensor([rows[-1]]),
        next_token_ids=torch.arange(count) + 1000 * seed,
        output_states=torch.randn(num_rows, HIDDEN, generator=make),
        req_ids=req_ids,
        owners=np.arange(count) % len(req_ids),
        in_order=rows == list(range(num_rows)),
    )


def _states(tokens: CommittedTokens) -> torch.Tensor:
    assert tokens.output_states is not None
    return torch.cat([tokens.layer_states(), tokens.output_states[tokens.rows]], dim=-1)


@pytest.mark.parametrize("plain", [True, False])
def test_joined_steps_are_the_steps(plain: bool) -> None:
    rows = [[0, 1], [0, 1, 2], [0, 1]] if plain else [[0, 1], [0, 3, 2], [1, 4]]
    sizes = [2, 3, 2] if plain else [2, 4, 6]
    steps = [_step(rows[i], sizes[i], ["a", "b"] if i < 2 else ["b", "c"], i + 1) for i in range(3)]
    joined = CommittedTokens.joined(steps)
    assert joined.in_order == plain
    assert torch.equal(_states(joined), torch.cat([_states(step) for step in steps]))
    for name in ("positions", "slots", "next_token_ids"):
        parts = [getattr(step, name) for step in steps]
        assert torch.equal(getattr(joined, name), torch.cat(parts)), name
    owners = [step.req_ids[i] for step in steps for i in step.owners.tolist()]  # type: ignore
    assert joined.owners is not None
    assert [joined.req_ids[i] for i in joined.owners.tolist()] == owners
    # Of the last step, by row.
    assert joined.last_rows is not None and joined.output_states is not None
    last = steps[-1]
    assert last.last_rows is not None and last.output_states is not None
    assert torch.equal(joined.output_states[joined.last_rows], last.output_states[last.last_rows])


def _drafter(late: bool, attends: bool = False) -> Any:
    seen: list[CommittedTokens] = []
    return SimpleNamespace(
        observes_late=late, attends_context=attends, observe=seen.append, seen=seen
    )


def test_a_drafter_that_may_sees_several_steps_at_once() -> None:
    drafter = _drafter(True)
    steps = CommitBuffer(drafter)
    for number in range(3):
        steps.add(partial(_step, [0, 1], 2, ["a", "b"], number))
    assert not drafter.seen
    steps.flush()
    steps.flush()
    assert [tokens.positions.tolist() for tokens in drafter.seen] == [[0, 1, 10, 11, 20, 21]]
    for number in range(20):
        steps.add(partial(_step, [0, 1], 2, ["a", "b"], number))
    assert sum(len(tokens.rows) for tokens in drafter.seen) >= 6 + 2 * 8, "without end"


@pytest.mark.parametrize(("late", "attends"), [(False, False), (True, True)])
def test_others_see_every_step(late: bool, attends: bool) -> None:
    drafter = _drafter(late, attends)
    steps = CommitBuffer(drafter)
    for number in range(3):
        steps.add(partial(_step, [0, 1], 2, ["a", "b"], number))
    assert len(drafter.seen) == 3
