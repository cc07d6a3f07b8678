# SPDX-License-Identifier: Apache-2.0
"""Occasional steps that only measure the cost of a step of another size.

Without them, a size that was once measured as too expensive would never be chosen again, and while
drafts pay no step is plain, so nothing would show that plain decoding has become cheaper.
"""

from __future__ import annotations

from vllm_specplug.budget.allocation import Allocation
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

    Every step with drafts adds to a credit for plain steps and one for other sizes, measured in
    steps' worth of tokens. A trial pays its expected loss from its credit.
    """

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        # By whether a step is plain.
        self._credits = {True: 0.0, False: 0.0}

    def choose(self, rows: int, best: Allocation) -> Allocation:
        """Returns the allocation of a plain step, or of a size near the best one, if it is due for
        a trial; else `best`.

        Args:
            rows: rows of a plain step.
        """
        if not best.count:
            return best
        for is_plain, share in ((True, _PLAIN_SHARE), (False, _SIZE_SHARE)):
            self._credits[is_plain] = min(self._credits[is_plain] + share, 1.0)
        for size in (rows, *self._curve.sizes_near(rows + best.count)):
            count = min(int(size) - rows, len(best.order))
            if count < 0 or count == best.count or best.ms_of[count] >= IMPOSSIBLE_MS:
                continue
            is_plain = count == 0
            has_changed = self._curve.is_surprising(size)
            stale = _STALE_STEPS_IF_CHANGED if has_changed else _STALE_STEPS
            if self._curve.age(size, plain=is_plain) < stale:
                continue
            trial = best.with_count(count)
            loss = 1.0 - trial.rate / best.rate
            if loss <= self._credits[is_plain] + _ADVANCE * has_changed:
                self._credits[is_plain] -= loss
                return trial
        return best
