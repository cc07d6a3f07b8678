# SPDX-License-Identifier: Apache-2.0
"""Which requests the contextual penalty is kept for; `test_tree_params` has what it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  stand-ins for what CPUs lack
from vllm import SamplingParams

from vllm_specplug.vllm_v2.penalty_processor import ContextualPenalty

LONGEST = 64


def past_every_check(**extra_args: Any) -> SamplingParams:
    params = SamplingParams()
    params.extra_args = extra_args
    return params


@pytest.fixture
def penalty() -> ContextualPenalty:
    tokens = SimpleNamespace(gpu=torch.zeros(3, LONGEST, dtype=torch.int32))
    return ContextualPenalty(None, SimpleNamespace(max_num_reqs=3, all_token_ids=tokens))


def windows(penalty: ContextualPenalty) -> list[int]:
    penalty.apply_staged_writes()
    return penalty.windows.gpu.tolist()


def test_a_slot_has_the_penalty_of_its_request_and_not_of_the_one_before(
    penalty: ContextualPenalty,
) -> None:
    asked = past_every_check(specplug_penalty=1.5, specplug_penalty_window=3)
    assert penalty.add_request(1, asked) and not penalty.add_request(0, SamplingParams())
    assert windows(penalty) == [0, 3, 0]
    assert penalty.is_used(np.array([0, 1])) and not penalty.is_used(np.array([0]))
    assert not penalty.add_request(1, SamplingParams())
    assert windows(penalty) == [0, 0, 0] and not penalty.is_used(np.array([0, 1]))


HOSTILE = ["1.2", 10**400, 10**5000, float("nan"), float("inf"), True, [[1]], {}, None, 0, b"1"]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(type(value).__name__))
def test_what_a_client_sent_past_every_check_is_ignored(
    penalty: ContextualPenalty, value: Any
) -> None:
    assert not penalty.add_request(0, past_every_check(specplug_penalty=value))
    is_number = isinstance(value, int) and not isinstance(value, bool)
    params = past_every_check(specplug_penalty=1.2, specplug_penalty_window=value)
    # A window beyond any text is the whole text.
    assert penalty.add_request(1, params) == (is_number and value > 0)
    assert windows(penalty) == [0, LONGEST if is_number and value else 0, 0]
