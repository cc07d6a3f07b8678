# SPDX-License-Identifier: Apache-2.0
"""What the runner keeps between steps, and for whom it drafts nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  stand-ins for what CPUs lack
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams

from vllm_specplug.vllm_v2.runner import TreeRunnerMixin, _plain_reason
from vllm_specplug.vllm_v2.step_context import StepContext
from vllm_specplug.vllm_v2.stop_tokens import MAX_STOP_TOKENS, StopTokens, stop_tokens_of


def test_a_sessions_block_of_states_comes_along_to_its_new_slot() -> None:
    """Its next turn finds its recurrent state in the block of its last step's last row."""
    blocks, slots = torch.tensor([4, 7, 0]), {"other": 0, "session": 1}
    runner: Any = SimpleNamespace(
        moves_states=True,
        model_state=SimpleNamespace(_mamba_state_idx_gpu=blocks),
        req_states=SimpleNamespace(req_id_to_index=slots),
    )
    with TreeRunnerMixin._sessions_keep_their_states(runner, ["session", "new"]):
        # vLLM adds both, with blocks that follow from their numbers of tokens.
        slots |= {"session": 2, "new": 1}
        blocks[1:] = torch.tensor([5, 3])
    assert blocks.tolist() == [4, 5, 7]


class _Stock:
    def execute_model(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self.step.trees, self.step.walk, self.step.states  # type: ignore[attr-defined]


class _Runner(TreeRunnerMixin, _Stock):  # type: ignore[misc]
    def __init__(self) -> None:
        self.begun = 0
        self.planner: Any = SimpleNamespace(begin_step=self._begin)
        self.step = StepContext()
        last: Any = "of the last step"
        self.step.trees = self.step.walk = self.step.states = last

    def _begin(self) -> None:
        self.begun += 1


def test_dummy_batches_carry_no_trees() -> None:
    """A replica without requests runs one beside the others; its last step's trees are over."""
    runner: Any = _Runner()
    assert runner.execute_model(None, dummy_run=True) == (None, None, None)
    assert runner.begun == 0
    runner.execute_model(None)
    assert runner.begun == 1


LOOPS = RepetitionDetectionParams(max_pattern_size=4, min_count=3)


@pytest.mark.parametrize(
    ("params", "embeds", "reason"),
    [
        (SamplingParams(), None, None),
        # No row of vLLM's tokens holds such a prompt.
        (SamplingParams(), object(), "embeds"),
        (SamplingParams(repetition_detection=LOOPS), None, "no_draft"),
        (SamplingParams(stop_token_ids=list(range(MAX_STOP_TOKENS))), None, None),
        (SamplingParams(stop_token_ids=list(range(MAX_STOP_TOKENS + 1))), None, "no_draft"),
    ],
)
def test_why_a_request_has_no_drafts(params: Any, embeds: Any, reason: str | None) -> None:
    request = SimpleNamespace(sampling_params=params, prompt_embeds=embeds)
    assert _plain_reason(request, stop_tokens_of(params)) == reason


def test_as_many_stop_tokens_as_a_client_sends_are_taken() -> None:
    params = SamplingParams(stop_token_ids=list(range(3 * MAX_STOP_TOKENS)))
    assert len(stop_tokens_of(params)) == 3 * MAX_STOP_TOKENS
    table = StopTokens(2, torch.device("cpu"))
    table.put(torch.tensor([1]), [stop_tokens_of(params)])
    assert (table.token_ids[1] >= 0).all() and (table.token_ids[0] == -1).all()
    assert stop_tokens_of(SamplingParams()) == set()
