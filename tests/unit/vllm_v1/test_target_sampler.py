# SPDX-License-Identifier: Apache-2.0
"""Sampling all rows before the walk: whose parameters, which distribution, and when not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_v1 import target_sampler as module
from vllm_specplug.vllm_v1.target_sampler import TargetSampler

VOCAB = 5


class CountedSampler:
    """vLLM's sampler, and the rows of each of its calls."""

    def __init__(self) -> None:
        self.sampler = Sampler()
        self.rows: list[int] = []

    def __call__(self, *, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> Any:
        self.rows.append(len(logits))
        return self.sampler(logits=logits, sampling_metadata=sampling_metadata)


def metadata(temperatures: list[float], **changes: Any) -> SamplingMetadata:
    count = len(temperatures)
    zero = torch.zeros(count)
    values: dict[str, Any] = {
        "temperature": torch.tensor(temperatures), "all_greedy": False, "all_random": False,
        "top_p": None, "top_k": None, "generators": {}, "max_num_logprobs": None,
        "no_penalties": True, "prompt_token_ids": None, "frequency_penalties": zero,
        "presence_penalties": zero, "repetition_penalties": zero + 1,
        "output_token_ids": [[] for _ in range(count)], "allowed_token_ids_mask": None,
        "bad_words_token_ids": {}, "logitsprocs": LogitsProcessors(),
    }  # fmt: skip
    return SamplingMetadata(**{**values, **changes})


def made(logits: torch.Tensor, meta: SamplingMetadata, at_once: bool = True) -> TargetSampler:
    outputs: list[list[int] | None] = [[] for _ in range(len(meta.frequency_penalties))]
    return TargetSampler(CountedSampler(), logits, meta, outputs, set(), at_once)


def test_rows_are_drawn_with_the_parameters_of_their_request() -> None:
    torch.manual_seed(0)
    draws = 4000
    row = torch.tensor([1.0, 0.5, 0.0, -1.0, -2.0])
    meta = metadata(
        [2.0, 1.0, 0.0], top_k=torch.tensor([VOCAB, 2, VOCAB]), top_p=torch.tensor([1.0, 1.0, 1.0])
    )
    sampler = made(row.repeat(3 * draws, 1), meta)
    tokens = sampler.sample_rows([0, draws, 2 * draws]).view(3, draws)
    hot = (row / 2).softmax(-1)
    two = torch.tensor([*row[:2].softmax(-1), 0, 0, 0])
    for drawn, expected in zip(tokens, (hot, two, torch.eye(VOCAB)[0]), strict=True):
        found = torch.bincount(drawn, minlength=VOCAB) / draws
        # Four standard deviations of a share.
        assert (found - expected).abs().max() < 4 * 0.5 / draws**0.5
        assert (found[expected == 0] == 0).all()


def test_the_walk_follows_the_samples_in_one_call() -> None:
    torch.manual_seed(1)
    chain = DraftTree.chain(np.array([3, 1]))
    fork = DraftTree(
        np.array([0, 2, 4]),
        np.array([-1, -1, 1], np.int32),
        np.array([1, 1, 2], np.int32),
        np.zeros(3, np.float32),
    )
    # Rows: a root without drafts, root and chain, root and fork. One token each is all but certain.
    best = [4, 3, 1, 0, 2, 0, 4, 1]
    logits = torch.full((8, VOCAB), -50.0).scatter_(1, torch.tensor(best)[:, None], 50.0)
    for at_once, calls in ((True, [8]), (False, [3, 3, 3])):
        sampler = made(logits.clone(), metadata([1.0, 1.0, 1.0]), at_once)
        result, output = sampler.walk([None, chain, fork], [0, 1, 4])
        assert result.token_ids == [[4], [3, 1, 0], [2, 4, 1]]
        assert result.accepted_paths == [[], [0, 1], [1, 2]]
        assert output.sampled_token_ids.tolist() == [[4, -1, -1], [3, 1, 0], [2, 4, 1]]
        assert sampler.sampler.rows == calls


def _min_p() -> LogitsProcessors:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1))
    processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
    processor.min_p_cpu[0], processor.min_p_count = 0.1, 1
    processor.min_p = torch.full((1, 1), 0.1)
    return LogitsProcessors([processor])


@pytest.mark.parametrize(
    "changes",
    [
        lambda: {"generators": {0: torch.Generator()}},
        lambda: {"max_num_logprobs": 1},
        lambda: {"no_penalties": False, "prompt_token_ids": torch.zeros(1, 1).long()},
        lambda: {"bad_words_token_ids": {0: [[2]]}},
        lambda: {"allowed_token_ids_mask": torch.zeros(1, VOCAB, dtype=torch.bool)},
        lambda: {"logitsprocs": _min_p()},
    ],
    ids=["seed", "logprobs", "penalties", "bad_words", "allowed", "min_p"],
)
def test_requests_with_state_are_sampled_node_by_node(changes: Any) -> None:
    logits = torch.full((3, VOCAB), -50.0).scatter_(1, torch.tensor([[3], [1], [0]]), 50.0)
    sampler = made(logits, replace(metadata([1.0]), **changes()))
    result, _ = sampler.walk([DraftTree.chain(np.array([3, 1]))], [0])
    assert result.token_ids == [[3, 1, 0]]
    assert sampler.sampler.rows == [1, 1, 1]


def test_large_batches_are_sampled_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ELEMENTS_AT_ONCE", 2 * VOCAB)
    sampler = made(torch.zeros(3, VOCAB), metadata([1.0]))
    sampler.walk([DraftTree.chain(np.array([0, 0]))], [0])
    assert set(sampler.sampler.rows) == {1}
