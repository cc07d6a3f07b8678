# SPDX-License-Identifier: Apache-2.0
"""The penalty as vLLM's batches drive it."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from vllm_specplug.tree.contextual_penalty import penalise
from vllm_specplug.vllm_v1.penalty_processor import ContextualPenaltyProcessor

PENALISED = SamplingParams(extra_args={"specplug_penalty": 1.5, "specplug_penalty_window": 3})


def _update(size, added=(), removed=(), moved=()):
    return BatchUpdate(batch_size=size, added=added, removed=removed, moved=moved)


def _expected(logits, row, tokens):
    expected = logits.clone()
    penalise(expected[row], torch.tensor(tokens), 1.5)
    return expected


def test_only_asking_requests_are_penalised_and_outputs_are_read_live() -> None:
    processor = ContextualPenaltyProcessor(None, torch.device("cpu"), False)
    assert processor.specplug_idle and not processor.is_argmax_invariant()
    output: list[int] = []
    processor.update_state(
        _update(2, added=[(0, SamplingParams(), [1], []), (1, PENALISED, [4, 5], output)])
    )
    assert not processor.specplug_idle
    logits = torch.randn(2, 10)
    assert torch.equal(processor.apply(logits.clone()), _expected(logits, 1, [4, 5]))
    output += [6, 7]  # two depths of a walk
    assert torch.equal(processor.apply(logits.clone()), _expected(logits, 1, [5, 6, 7]))
    del output[1:]  # the walk takes them back
    assert torch.equal(processor.apply(logits.clone()), _expected(logits, 1, [4, 5, 6]))


def _past_every_check(**extra_args):
    params = SamplingParams()
    params.extra_args = extra_args
    return params


def test_what_a_client_sent_past_every_check_is_ignored() -> None:
    hostile = ["1.2", 10**400, 10**5000, float("nan"), float("inf"), True, [[1]], {}, None, 0, b"1"]
    requests = [_past_every_check(specplug_penalty=value) for value in hostile]
    requests += [
        _past_every_check(specplug_penalty=1.2, specplug_penalty_window=value)
        for value in hostile
        if not isinstance(value, int) or isinstance(value, bool)
    ]
    processor = ContextualPenaltyProcessor(None, torch.device("cpu"), False)
    added = [(i, params, [4, 5], []) for i, params in enumerate(requests)]
    processor.update_state(_update(len(requests), added=added))
    assert processor.specplug_idle
    # Windows beyond any text are the whole text; tokens without a logit are left out.
    for window in (10**9, 10**400):
        params = _past_every_check(specplug_penalty=1.5, specplug_penalty_window=window)
        processor.update_state(_update(1, added=[(0, params, [4, 99], [5])]))
        logits = torch.randn(1, 10)
        assert torch.equal(processor.apply(logits.clone()), _expected(logits, 0, [4, 5]))


def test_requests_move_and_leave() -> None:
    processor = ContextualPenaltyProcessor(None, torch.device("cpu"), False)
    processor.update_state(_update(2, added=[(1, PENALISED, [4], [])]))
    processor.update_state(_update(2, moved=[(1, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    logits = torch.randn(2, 10)
    assert torch.equal(processor.apply(logits.clone()), _expected(logits, 0, [4]))
    processor.update_state(_update(1, removed=[0]))
    assert processor.specplug_idle
    assert torch.equal(processor.apply(logits.clone()), logits)
