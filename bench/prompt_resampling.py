# SPDX-License-Identifier: Apache-2.0
"""Tokens per step with confidence intervals over prompts, and of one policy over another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_RESAMPLES = 4000
_SEED = 5


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """For a table."""
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}, {self.high:.{digits}f})"

    def to_json(self) -> list[float]:
        """Value, low and high, rounded."""
        return [round(number, 4) for number in (self.value, self.low, self.high)]


@dataclass(frozen=True)
class PromptCounts:
    """Of one policy, by prompt: [P] tokens and steps."""

    tokens: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> PromptCounts:
        """From (tokens, steps) of every prompt."""
        array = np.asarray(pairs, np.int64).reshape(-1, 2)
        return cls(array[:, 0], array[:, 1])

    def of_prompts(self, chosen: Sequence[int]) -> PromptCounts:
        """Of some prompts."""
        return PromptCounts(self.tokens[list(chosen)], self.steps[list(chosen)])

    def rate(self) -> Interval:
        """Tokens per step, over all steps of all prompts."""
        return _interval(
            float(self.tokens.sum() / self.steps.sum()), self._resampled(_draws(len(self.steps)))
        )

    def over(self, other: PromptCounts) -> Interval:
        """Tokens per step over those of another policy on the same prompts."""
        draws = _draws(len(self.steps))
        value = self.tokens.sum() / self.steps.sum() * (other.steps.sum() / other.tokens.sum())
        return _interval(float(value), self._resampled(draws) / other._resampled(draws))

    def _resampled(self, draws: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        rates: npt.NDArray[np.float64] = self.tokens[draws].sum(1) / self.steps[draws].sum(1)
        return rates


def _draws(prompts: int) -> npt.NDArray[np.int64]:
    """[_RESAMPLES, P] prompts drawn with replacement, the same for every policy."""
    return np.random.default_rng(_SEED).integers(0, prompts, (_RESAMPLES, prompts))


def _interval(value: float, resampled: npt.NDArray[np.float64]) -> Interval:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(value, float(low), float(high))
