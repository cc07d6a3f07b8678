# SPDX-License-Identifier: Apache-2.0
"""Whether lookups pay: with many requests they take more than a millisecond per step, and most of
what they find is not worth its row."""

from __future__ import annotations

_REST_STEPS = 8
"""Steps without lookups after which they are tried again."""
_FIRST_STEPS = 16
"""Steps with lookups before they may rest."""
_LEARNING_RATE = 0.03
_SPIKE_WEIGHT = 0.5
"""Share of a single step's worth that counts at once: a text that begins to repeat itself is to be
looked up in the next step."""


class LookupGate:
    """Lets lookups rest while what they find is worth less than the time they take."""

    def __init__(self) -> None:
        self.is_on = True
        """False where ranks draft together: their clocks differ, and their decisions may not."""
        # Steps, worth and cost by number of requests, doubling: another load, another answer.
        self._averages: dict[int, tuple[int, float, float]] = {}
        self._load = 0
        self._rest_steps = 0

    def rests(self, num_requests: int) -> bool:
        """Whether the step that begins goes without lookups. Call once a step."""
        load = num_requests.bit_length()
        if load != self._load:
            self._load, self._rest_steps = load, 0
        if not self._rest_steps:
            return False
        self._rest_steps -= 1
        return True

    @property
    def is_resting(self) -> bool:
        """Whether steps to come go without lookups."""
        return self._rest_steps > 0

    def advance(self, steps: int) -> None:
        """So many steps went by in which nobody asked."""
        self._rest_steps = max(0, self._rest_steps - steps)

    def observe(self, worth_ms: float, cost_ms: float) -> None:
        """In a step without a draft forward, lookups and choosing among what they found took
        `cost_ms`, and what was chosen is expected to save `worth_ms`."""
        if not self.is_on:
            return
        seen, worth, cost = self._averages.get(self._load, (0, 0.0, 0.0))
        rate = max(_LEARNING_RATE, 1.0 / (seen + 1))
        worth += rate * (worth_ms - worth)
        cost += rate * (cost_ms - cost)
        self._averages[self._load] = seen + 1, worth, cost
        if seen + 1 >= _FIRST_STEPS and max(worth, _SPIKE_WEIGHT * worth_ms) < cost:
            self._rest_steps = _REST_STEPS
