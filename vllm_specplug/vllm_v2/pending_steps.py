# SPDX-License-Identifier: Apache-2.0
"""Steps and drafts that the host has launched on a device and not read yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specplug.budget.adaptive_budget import Plan
from vllm_specplug.vllm_v2.host_step import StepCopy, TreesCopy
from vllm_specplug.vllm_v2.step_context import StepRecord

HELD_STEPS = 3
"""Number of later steps that reuse a decision of an adaptive budget while the batch stays the same.
A decision takes the host a millisecond; trees fill the rows that it reserves two steps later."""


@dataclass(frozen=True)
class PendingStep:
    """A step that the host reads once its copy has arrived."""

    input_batch: Any
    copy: StepCopy
    # the trees that it verified, by request
    trees: dict[str, tuple[TreesCopy, int]]
    record: StepRecord

    @property
    def has_arrived(self) -> bool:
        # The copies of its trees were launched before this one.
        return self.copy.copy.has_arrived


@dataclass(frozen=True)
class PendingDraft:
    """Trees that an adaptive budget decides on once their copy has arrived."""

    # plan of the requests at `rows` of the batch; None if there are none
    _plan: Plan | None
    rows: list[int]
    # requests of the batch that decode
    decoding: list[str]
    # [R] for how many nodes of each tree the next step has rows
    room: list[int]
    # all requests of the batch, and [R] most nodes of each
    req_ids: list[str]
    budgets: np.ndarray
    _copy: TreesCopy | None = None
    # Whether the plan is an earlier step's, which is decided on with that step's trees
    is_held: bool = False

    @property
    def plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    @property
    def copy(self) -> TreesCopy:
        assert self._copy is not None
        return self._copy

    @property
    def has_arrived(self) -> bool:
        return self.copy.copy.has_arrived

    def is_for(self, req_ids: list[str], budgets: np.ndarray) -> bool:
        """Whether the plan fits this batch."""
        return req_ids == self.req_ids and np.array_equal(budgets, self.budgets)

    def forward_depths(self, count: int) -> np.ndarray:
        """Returns int32 [count]: depth of the draft forward for each request; 0 for none."""
        depths = np.zeros(count, np.int32)
        if self._plan is not None:
            depths[self.rows] = self._plan.depths
        return depths
