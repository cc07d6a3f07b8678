# SPDX-License-Identifier: Apache-2.0
"""A curve of milliseconds by rows, measured at start and corrected while serving."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specplug.budget import Floats

# Corrections are a Gaussian process over the knots, in log time. The unit of all variances is the
# variance of a single step's time.
_SHARED_VARIANCE = 0.2
"""Variance shared by all knots: the machine is slower or faster than measured."""
_KNOT_VARIANCE = 0.1
"""Variance of one knot, shared with nearby knots: the curve has another shape."""
_CORRELATION_LENGTH = 2.0
"""Doublings of rows over which knots share this variance."""
_TREE_VARIANCE = 0.3
"""Variance of the factor between steps with and without draft trees."""
TREE_FADING = 0.002
"""Decay of the additional cost of trees in every step without trees. If trees seem too expensive,
none are verified, and nothing else would show that they have become cheaper."""
_FORGETTING_RATE = 0.04
"""Share of the prior variance that every step restores, so that older observations count less."""
_MAX_RESIDUAL = 0.1
"""Limit on the residual of one observation, in log time. An interrupted step moves the curve by
2 %. The curve still follows a lasting change within some tens of steps."""
_MIN_WEIGHT = 0.25
"""Minimum interpolation weight of a knot for a step to count as a measurement of that knot."""
_MAX_REPEATS = 8
"""Number of consecutive large residuals of one sign up to which their weight increases."""


class CostCurve:
    """A piecewise linear, non-decreasing curve with a correction learnt from real steps.

    The correction has one logarithm per knot and one for all steps with draft trees, which take
    longer than plain steps of as many rows. Every step corrects the knots next to its size, and the
    other knots through the shared variance, so a slowdown of the machine is learnt for all sizes at
    once. A size that has not occurred for long follows its neighbours, and is corrected quickly
    when it occurs.
    """

    def __init__(self, rows: Sequence[float], milliseconds: Sequence[float]) -> None:
        """Takes at least one size in rows, in ascending order, and the times measured for them."""
        self.rows: Floats = np.asarray(rows, np.float64)
        measured = np.asarray(milliseconds, np.float64)
        assert len(self.rows) == len(measured) > 0 and (measured > 0).all()
        assert (np.diff(self.rows) > 0).all()
        if len(self.rows) == 1:
            # A single time does not show the slope, so the time is assumed to be proportional.
            self.rows = np.array([self.rows[0], 2 * self.rows[0]])
            measured = np.array([measured[0], 2 * measured[0]])
        # More rows cannot take less time, and noise only adds time, so a size costs at most the
        # time of a larger one.
        self.measured: Floats = np.minimum.accumulate(measured[::-1])[::-1]
        # [knots + 1] corrections; the last one is for trees
        self._logs = np.zeros(len(self.rows) + 1)
        distances = np.abs(np.subtract.outer(np.log2(self.rows), np.log2(self.rows)))
        self._prior_covariance: Floats = np.zeros((len(self._logs), len(self._logs)))
        self._prior_covariance[:-1, :-1] = _SHARED_VARIANCE + _KNOT_VARIANCE * np.exp(
            -distances / _CORRELATION_LENGTH
        )
        self._prior_covariance[-1, -1] = _TREE_VARIANCE
        self._covariance = self._prior_covariance.copy()
        # By knot: number of consecutive large residuals, positive if steps took too long.
        self._surprises = np.zeros(len(self.rows), np.int64)
        self._steps = 0
        self._last_seen = np.zeros(len(self.rows), np.int64)
        self._last_seen_plain = np.zeros(len(self.rows), np.int64)
        self._values = self.measured

    def __call__(self, rows: npt.ArrayLike) -> Floats:
        """Returns the milliseconds of `rows`.

        The last slope continues beyond the last knot; the curve is constant below the first knot.
        """
        rows = np.asarray(rows, np.float64)
        knots, values = self.rows, self._values
        slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
        return np.interp(rows, knots, values) + slope * np.maximum(rows - knots[-1], 0.0)

    @property
    def tree_factor(self) -> float:
        """Time of a step with draft trees relative to a plain one of as many rows; at least 1."""
        return float(np.exp(self._logs[-1]))

    def observe(
        self,
        rows: float,
        milliseconds: float,
        expected: float | None = None,
        *,
        has_trees: bool = False,
    ) -> None:
        """Learns from a real step of `rows` rows that took `milliseconds`.

        Args:
            expected: predicted time, if the step has other costs too. The default is the curve at
                `rows`, multiplied by `tree_factor` for a step with trees.
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
        # One large residual is an interruption; several in a row are a change.
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
        """Returns the number of steps since a size near `rows` occurred (with `plain`, in a plain
        step), or of all steps if it has not."""
        seen = self._last_seen_plain if plain else self._last_seen
        return self._steps - int(seen[self._nearest(rows)])

    def is_surprising(self, rows: float) -> bool:
        """Whether the last step of a size near `rows` had a large residual."""
        return bool(self._surprises[self._nearest(rows)])

    def sizes_near(self, rows: float) -> list[float]:
        """Returns up to two knots above `rows` and up to one below."""
        above = self.rows[self.rows > rows][:2].tolist()
        return above + self.rows[self.rows < rows][-1:].tolist()

    def _nearest(self, rows: float) -> int:
        return int(np.argmin(np.abs(self.rows - rows)))
