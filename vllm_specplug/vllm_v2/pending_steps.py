# SPDX-License-Identifier: Apache-2.0
"""Steps and drafts of a device that the host has launched and not looked at yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specplug.budget import Plan
from vllm_specplug.vllm_v2.host_step import StepCopy, TreesCopy
from vllm_specplug.vllm_v2.step_context import StepRecord

HELD_STEPS = 3
"""Steps after a decision of an adaptive budget for which it holds while the batch stays the same. A
decision takes the host a millisecond, and the rows that it reserves are filled two steps later."""


@dataclass(frozen=True)
class PendingStep:
    """A step that the host looks at once its copy has come."""

    input_batch: Any
    copy: StepCopy
    # those it verified, by request
    trees: dict[str, tuple[TreesCopy, int]]
    record: StepRecord
    # `Drafter.source` of these trees, and how long the step took; 0 where that is not known
    source: str | None = None
    milliseconds: float = 0.0

    @property
    def has_come(self) -> bool:
        # Its trees were drafted, and copied, before it.
        return self.copy.copy.has_come


@dataclass(frozen=True)
class PendingDraft:
    """Trees that an adaptive budget decides on once their copy has come."""

    # of the requests at `rows` of the batch; None where there are none
    _plan: Plan | None
    rows: list[int]
    # requests of the batch that decode
    decoding: list[str]
    # [R] nodes of each that the next step has rows for
    room: list[int]
    # all requests of the batch, and [R] most nodes of each
    req_ids: list[str]
    budgets: np.ndarray
    _copy: TreesCopy | None = None
    # Whether the plan is an earlier step's, and decided on with that one's trees.
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
    def has_come(self) -> bool:
        return self.copy.copy.has_come

    def is_for(self, req_ids: list[str], budgets: np.ndarray) -> bool:
        """Whether the plan fits this batch."""
        return req_ids == self.req_ids and np.array_equal(budgets, self.budgets)

    def forward_depths(self, count: int) -> np.ndarray:
        """Depth of the draft forward for each request of the batch, int32 [count]; 0 for none."""
        depths = np.zeros(count, np.int32)
        if self._plan is not None:
            depths[self.rows] = self._plan.depths
        return depths
