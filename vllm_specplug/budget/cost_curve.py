# SPDX-License-Identifier: Apache-2.0
"""Milliseconds as a function of rows: measured once, corrected while serving."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_COMMON_STEP = 0.08
_OWN_STEP = 0.02
"""Shares of the difference to a new time that one observation takes over: for all rows, and for the
knots beside it."""
_CLIP = 0.25
"""Most a single observation may differ, in log time: an interrupted step moves the curve by 2.5 %,
a lasting change of speed still arrives within some tens of steps."""
_FORGET = 0.999
"""What is left, one step later, of the correction of a knot that the step did not visit."""


class CostCurve:
    """Piecewise linear in rows, never falling, with a correction learnt from real steps.

    The correction is a common factor times one per knot, kept as logarithms. Every step teaches
    both, so a slowdown of the whole machine does not have to be learnt row count by row count;
    what a knot has not seen for long is forgotten.
    """

    def __init__(self, rows: Sequence[float], milliseconds: Sequence[float]) -> None:
        """`rows` ascending, at least one; `milliseconds` > 0, times measured at them."""
        self.rows: Floats = np.asarray(rows, np.float64)
        measured = np.asarray(milliseconds, np.float64)
        assert len(self.rows) == len(measured) > 0 and (measured > 0).all()
        assert (np.diff(self.rows) > 0).all()
        if len(self.rows) == 1:
            # A single time says nothing about the slope: every row is taken to cost its share.
            self.rows = np.array([self.rows[0], 2 * self.rows[0]])
            measured = np.array([measured[0], 2 * measured[0]])
        # More rows cannot take less time, and noise only adds to it: a size costs at most what a
        # larger one was measured at.
        self.measured: Floats = np.minimum.accumulate(measured[::-1])[::-1]
        self._log_common = 0.0
        self._log_own = np.zeros(len(self.rows))
        self._values = self.measured

    def __call__(self, rows: npt.ArrayLike) -> Floats:
        """Milliseconds of `rows`; past the last knot along the last slope, below the first knot
        the first value."""
        rows = np.asarray(rows, np.float64)
        knots, values = self.rows, self._values
        slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
        return np.interp(rows, knots, values) + slope * np.maximum(rows - knots[-1], 0.0)

    def observe(self, rows: float, milliseconds: float, expected: float | None = None) -> None:
        """A real step of `rows` rows took `milliseconds`.

        `expected` is what the curve's own share of the time was taken to be, where the time
        has other shares as well; default: the curve at `rows`.
        """
        if expected is None:
            expected = float(self(rows))
        if not (milliseconds > 0 and expected > 0):
            return
        error = float(np.clip(np.log(milliseconds / expected), -_CLIP, _CLIP))
        right = int(np.clip(np.searchsorted(self.rows, rows), 1, len(self.rows) - 1))
        left = right - 1
        span = self.rows[right] - self.rows[left]
        weight = float(np.clip((rows - self.rows[left]) / span, 0.0, 1.0))
        shares = np.zeros(len(self.rows))
        shares[left], shares[right] = 1.0 - weight, weight
        self._log_own[shares == 0] *= _FORGET
        self._log_own += _OWN_STEP * error * shares
        self._log_common += _COMMON_STEP * error
        self._values = np.maximum.accumulate(
            self.measured * np.exp(self._log_common + self._log_own)
        )
