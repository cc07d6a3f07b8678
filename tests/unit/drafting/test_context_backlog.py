# SPDX-License-Identifier: Apache-2.0
"""The head's context is written late, whole, and before pages change hands."""

from __future__ import annotations

import pytest
import torch

from vllm_specplug.drafting.context_backlog import ContextBacklog

Written = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _tokens(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    places = torch.arange(first, first + count)
    return places[:, None].float(), places, 100 + places


@pytest.fixture
def written() -> Written:
    return []


@pytest.fixture
def backlog(written: Written) -> ContextBacklog:
    return ContextBacklog(lambda *columns: written.append(columns), max_tokens=10)


def test_tokens_wait_and_are_written_together_in_their_order(
    backlog: ContextBacklog, written: Written
) -> None:
    for first in (0, 4):
        backlog.add(*_tokens(first, 4))
    assert written == []
    backlog.flush()
    (columns,) = written
    for found, expected in zip(columns, _tokens(0, 8), strict=True):
        assert torch.equal(found, expected)
    backlog.flush()
    assert len(written) == 1, "nothing is written twice"


def test_what_waits_is_bounded(backlog: ContextBacklog, written: Written) -> None:
    for first in range(0, 60, 3):
        backlog.add(*_tokens(first, 3))
    assert [len(slots) for _, _, slots in written] == [12] * 5
    backlog.add(*_tokens(0, 500))
    assert len(written) == 6, "a prompt does not wait"


def test_steps_without_tokens_leave_nothing(backlog: ContextBacklog, written: Written) -> None:
    backlog.add(*_tokens(0, 0))
    backlog.flush()
    assert written == []
