# SPDX-License-Identifier: Apache-2.0
"""Skips lookups that do not pay.

With many requests lookups take more than a millisecond per step, and most of their nodes do not pay
for their rows.
"""

from __future__ import annotations

_SKIPPED_STEPS = 8
"""Number of steps without lookups before they are tried again."""
_MIN_STEPS = 16
"""Number of steps with lookups before they may be skipped."""
_LEARNING_RATE = 0.03
_SPIKE_WEIGHT = 0.5
"""Weight of a single step's saving, which counts at once. With it, a text that begins to repeat
itself is looked up in the next step."""


class LookupGate:
    """Skips lookups while they save less time than they take."""

    def __init__(self) -> None:
        self.is_on = True
        """False if ranks draft together, because their clocks differ."""
        # Steps, saving and cost by load: the number of requests, rounded to powers of two.
        self._averages: dict[int, tuple[int, float, float]] = {}
        self._load = 0
        self._steps_to_skip = 0

    def should_skip(self, num_requests: int) -> bool:
        """Returns whether to skip the lookups of this step. Call it once per step."""
        load = num_requests.bit_length()
        if load != self._load:
            self._load, self._steps_to_skip = load, 0
        if not self._steps_to_skip:
            return False
        self._steps_to_skip -= 1
        return True

    def observe(self, saved_ms: float, cost_ms: float) -> None:
        """Learns from a step without a draft forward.

        Args:
            saved_ms: expected saving of the chosen nodes.
            cost_ms: time of the lookups and of the choice among their nodes.
        """
        if not self.is_on:
            return
        seen, saved, cost = self._averages.get(self._load, (0, 0.0, 0.0))
        rate = max(_LEARNING_RATE, 1.0 / (seen + 1))
        saved += rate * (saved_ms - saved)
        cost += rate * (cost_ms - cost)
        self._averages[self._load] = seen + 1, saved, cost
        if seen + 1 >= _MIN_STEPS and max(saved, _SPIKE_WEIGHT * saved_ms) < cost:
            self._steps_to_skip = _SKIPPED_STEPS
