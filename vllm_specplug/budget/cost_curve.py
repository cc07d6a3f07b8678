# SPDX-License-Identifier: Apache-2.0
"""Milliseconds as a function of rows: measured once, corrected while serving."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Corrections are a Gaussian process over the knots, in log time: how sure they are is counted in
# the variance of a single step's time.
_SHARED_VARIANCE = 0.2
"""Variance that all knots share: the machine is slower or faster than it was measured."""
_KNOT_VARIANCE = 0.1
"""Variance of one knot: the curve has another shape. Shared with knots near it."""
_CORRELATION_LENGTH = 2.0
"""Doublings of rows over which knots share it."""
_TREE_VARIANCE = 0.3
"""Variance of what steps with draft trees take more than others of as many rows."""
TREE_FADING = 0.002
"""Share of what trees take by themselves that every step without any takes from it: where they seem
too dear for any to be verified, nothing else would ever show that they no longer are."""
_FORGETTING_RATE = 0.04
"""Share of the prior variance that every step restores: older observations count less."""
_MAX_RESIDUAL = 0.1
"""Largest difference of one observation, in log time: an interrupted step moves the curve by 2 %,
a lasting change of speed is still followed within some tens of steps."""
_MIN_WEIGHT = 0.25
"""Weight in a step's size from which on the step counts as a measurement of a knot."""
_MAX_REPEATS = 8
"""Consecutive differences of one sign beyond which confidence does not grow further."""


class CostCurve:
    """Piecewise linear in rows, never falling, with a correction learnt from real steps.

    The correction is one logarithm per knot, and one for all steps with draft trees: these take
    longer than plain ones of as many rows, which were what was measured at first. Every step
    corrects the knots beside it, and the others by what they have in common with these: a slowdown
    of the whole machine does not have to be learnt row count by row count, and a size that was not
    seen for long follows its neighbours but is quick to learn when it is.
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
        # [knots + 1], the last one that of trees.
        self._logs = np.zeros(len(self.rows) + 1)
        distances = np.abs(np.subtract.outer(np.log2(self.rows), np.log2(self.rows)))
        self._prior_covariance: Floats = np.zeros((len(self._logs), len(self._logs)))
        self._prior_covariance[:-1, :-1] = _SHARED_VARIANCE + _KNOT_VARIANCE * np.exp(
            -distances / _CORRELATION_LENGTH
        )
        self._prior_covariance[-1, -1] = _TREE_VARIANCE
        self._covariance = self._prior_covariance.copy()
        # By knot: how often in a row times were too long (> 0) or too short to be believed.
        self._surprises = np.zeros(len(self.rows), np.int64)
        self._steps = 0
        self._last_seen = np.zeros(len(self.rows), np.int64)
        self._last_seen_plain = np.zeros(len(self.rows), np.int64)
        self._values = self.measured

    def __call__(self, rows: npt.ArrayLike) -> Floats:
        """Milliseconds of `rows`; past the last knot along the last slope, below the first knot
        the first value."""
        rows = np.asarray(rows, np.float64)
        knots, values = self.rows, self._values
        slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
        return np.interp(rows, knots, values) + slope * np.maximum(rows - knots[-1], 0.0)

    @property
    def tree_factor(self) -> float:
        """What a step with draft trees takes over a plain one of as many rows, at least 1."""
        return float(np.exp(self._logs[-1]))

    def observe(
        self,
        rows: float,
        milliseconds: float,
        expected: float | None = None,
        *,
        has_trees: bool = False,
    ) -> None:
        """A real step of `rows` rows took `milliseconds`.

        Args:
            expected: what the step was taken to cost, where the time has other shares than the
                curve's as well; default: the curve at `rows`, times `tree_factor` with trees.
            has_trees: whether the step verified any draft tree.
        """
        if expected is None:
            expected = float(self(rows)) * (self.tree_factor if has_trees else 1.0)
        if not (milliseconds > 0 and expected > 0):
            return
        error = float(np.log(milliseconds / expected))
        right = int(np.clip(np.searchsorted(self.rows, rows), 1, len(self.rows) - 1))
        left = right - 1
        span = self.rows[right] - self.rows[left]
        weight = float(np.clip((rows - self.rows[left]) / span, 0.0, 1.0))
        nearest = right if weight > 0.5 else left
        self._steps += 1
        for knot, share in ((left, 1.0 - weight), (right, weight)):
            if share >= _MIN_WEIGHT:
                self._last_seen[knot] = self._steps
                if not has_trees:
                    self._last_seen_plain[knot] = self._steps
        # One step of odd length was interrupted; several of a size in a row are the truth.
        sign = int(np.sign(error)) if abs(error) > _MAX_RESIDUAL else 0
        before = self._surprises[nearest]
        self._surprises[nearest] = before + sign if before * sign >= 0 and sign else sign
        variance = 1.0 / min(max(1, abs(self._surprises[nearest])), _MAX_REPEATS) ** 2
        covariance = self._covariance
        shared = (1.0 - weight) * covariance[left] + weight * covariance[right]
        if has_trees:
            shared = shared + covariance[-1]
        own = (1.0 - weight) * shared[left] + weight * shared[right] + has_trees * shared[-1]
        gain = shared / (own + variance)
        self._logs += gain * min(max(error, -_MAX_RESIDUAL), _MAX_RESIDUAL)
        covariance -= np.outer(gain, shared)
        covariance += _FORGETTING_RATE * (self._prior_covariance - covariance)
        self._logs[-1] = max(0.0, self._logs[-1]) * (1.0 if has_trees else 1.0 - TREE_FADING)
        self._values = np.maximum.accumulate(self.measured * np.exp(self._logs[:-1]))

    def age(self, rows: float, *, plain: bool = False) -> int:
        """Steps since a size like `rows` was last observed, or since it was in a `plain` step; all
        sizes count as seen at first."""
        seen = self._last_seen_plain if plain else self._last_seen
        return self._steps - int(seen[self._nearest(rows)])

    def is_surprising(self, rows: float) -> bool:
        """Whether a size like `rows` was far from what was expected when last observed."""
        return bool(self._surprises[self._nearest(rows)])

    def sizes_near(self, rows: float) -> list[float]:
        """The two knots above `rows`, and the one below, where there are."""
        above = self.rows[self.rows > rows][:2].tolist()
        return above + self.rows[self.rows < rows][-1:].tolist()

    def _nearest(self, rows: float) -> int:
        return int(np.argmin(np.abs(self.rows - rows)))
