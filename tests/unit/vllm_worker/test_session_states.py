# SPDX-License-Identifier: Apache-2.0
"""A session's next turn finds its recurrent state in the block of its last step's last row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  stand-ins for what CPUs lack

from vllm_specplug.vllm_v1.runner import TreeRunnerMixin
from vllm_specplug.vllm_v2.runner import TreeRunnerMixin
from vllm_specplug.vllm_worker.constrained import ConstrainedRequests


class _Stock:
    def _update_states(self, scheduler_output: Any) -> None: ...


class _Runner(TreeRunnerMixin, _Stock):
    def __init__(self, blocks: dict[str, int]) -> None:
        forget = SimpleNamespace(forget=lambda names: None, observes_late=False)
        self.device = torch.device("cpu")
        self.begun: set[str] = set()
        self.drafter: Any = SimpleNamespace(drafter=forget)
        self.planner: Any = forget
        self.proposed_trees: Any = {}
        self.tree_constrained = ConstrainedRequests()
        self.mamba_state_idx = blocks
        self.input_batch: Any = SimpleNamespace(thinking_budget_state_holder=None)


def test_v1_forgets_the_blocks_of_what_ends_and_no_others() -> None:
    runner = _Runner({"ended": 1, "preempted": 2, "session": 3, "other": 4})
    scheduled = [SimpleNamespace(req_id=name, sampling_params=None) for name in ("session", "new")]
    runner._update_states(
        SimpleNamespace(
            finished_req_ids={"ended"},
            preempted_req_ids={"preempted"},
            scheduled_new_reqs=scheduled,
        )
    )
    assert runner.mamba_state_idx == {"session": 3, "other": 4}


def test_v2_takes_a_sessions_block_along_to_its_new_slot() -> None:
    blocks, slots = torch.tensor([4, 7, 0]), {"other": 0, "session": 1}
    runner: Any = SimpleNamespace(
        _moves_states=True,
        model_state=SimpleNamespace(_mamba_state_idx_gpu=blocks),
        req_states=SimpleNamespace(req_id_to_index=slots),
    )
    with TreeRunnerMixin._sessions_keep_their_states(runner, ["session", "new"]):
        # vLLM adds both, with blocks that follow from their numbers of tokens.
        slots |= {"session": 2, "new": 1}
        blocks[1:] = torch.tensor([5, 3])
    assert blocks.tolist() == [4, 5, 7]
