# SPDX-License-Identifier: Apache-2.0
"""Schedules occasional steps that only measure the cost of a step of another size.

Without them, a size that was once measured as too expensive would never be chosen again, and while
drafts pay no step is plain, so nothing would show that plain decoding has become cheaper.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_specplug.budget.allocation import Allocation
from vllm_specplug.budget.arrays import Floats
from vllm_specplug.budget.cost_curve import CostCurve
from vllm_specplug.budget.draft_gate import IMPOSSIBLE_MS

_STALE_STEPS, _STALE_STEPS_IF_CHANGED = 100, 4
"""Steps after which a size that did not occur is measured again. The second value is for a size
whose last step was unexpectedly long or short: its cost has changed, or it was interrupted."""
_PLAIN_SHARE, _SIZE_SHARE = 0.002, 0.001
"""Shares of the tokens that trials of plain steps, and of other sizes, may cost."""
_ADVANCE = 1.5
"""Credit in advance for trials of a size whose cost has changed."""


class CostTrials:
    """Decides which steps are trials.

    Every step adds to a credit, measured in steps' worth of tokens. A trial pays its expected loss
    from the credit.
    """

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self.plain_credit = self.size_credit = 0.0

    def earn(self, steps: int = 1) -> None:
        """Adds the credit of `steps` steps."""
        self.plain_credit = min(self.plain_credit + steps * _PLAIN_SHARE, 1.0)
        self.size_credit = min(self.size_credit + steps * _SIZE_SHARE, 1.0)

    def starts_plain(self, rows: int, gain: float) -> bool:
        """Returns whether this step is plain only to measure a plain step.

        Args:
            rows: rows of a plain step.
            gain: expected tokens per millisecond with drafts, relative to a plain step.
        """
        loss = 1.0 - 1.0 / gain
        limit = self.plain_credit + self._advance(rows)
        if loss == 0.0 or not self._is_due(rows, plain=True) or loss > limit:
            return False
        self.plain_credit -= loss
        return True

    def another_size(
        self,
        rows: int,
        best: Allocation,
        allocate_at: Callable[[Floats], Allocation],
        step_ms: Floats,
    ) -> Allocation:
        """Returns the allocation of a neighbouring size if it is due for a trial, else `best`.

        Args:
            rows: rows of a plain step.
            allocate_at: returns the best allocation for given costs of a step.
            step_ms: costs of a step by number of nodes.
        """
        chosen = int(best.kept.sum())
        if not chosen:
            return best
        for size in self._curve.sizes_near(rows + chosen):
            count = min(int(size) - rows, len(step_ms) - 1)
            if count < 1 or count == chosen or not self._is_due(size):
                continue
            only = np.full(len(step_ms), IMPOSSIBLE_MS)
            only[count] = step_ms[count]
            other = allocate_at(only)
            loss = 1.0 - other.rate / best.rate
            if loss <= self.size_credit + self._advance(size):
                self.size_credit -= loss
                return other
        return best

    def _is_due(self, rows: float, *, plain: bool = False) -> bool:
        has_changed = self._curve.is_surprising(rows)
        stale = _STALE_STEPS_IF_CHANGED if has_changed else _STALE_STEPS
        return self._curve.age(rows, plain=plain) >= stale

    def _advance(self, rows: float) -> float:
        return _ADVANCE * self._curve.is_surprising(rows)
