# SPDX-License-Identifier: Apache-2.0
"""Whether looking up is worth its time: with many requests it takes milliseconds a step, and most
of what it finds does not pay for its row."""

from __future__ import annotations

_REST_STEPS = 8
"""Steps without lookups after which they are tried again."""
_FIRST_STEPS = 16
"""Steps with lookups before they may rest."""
_LEARNING_RATE = 0.03
_SUDDEN = 0.5
"""Share of a single step's worth that counts at once: a text that begins to repeat itself is to be
looked up in the next step."""


class LookupGate:
    """Lets lookups rest while what they find is worth less than the time they take."""

    def __init__(self) -> None:
        self._seen = 0
        self._worth_ms = self._cost_ms = 0.0
        self._rest_steps = 0

    def rests(self) -> bool:
        """Whether the step that begins goes without lookups. Call once a step."""
        if not self._rest_steps:
            return False
        self._rest_steps -= 1
        return True

    @property
    def is_resting(self) -> bool:
        """Whether steps to come go without lookups."""
        return self._rest_steps > 0

    def pass_by(self, steps: int) -> None:
        """So many steps went by in which nobody asked."""
        self._rest_steps = max(0, self._rest_steps - steps)

    def observe(self, worth_ms: float, cost_ms: float) -> None:
        """In a step without a draft forward, lookups and choosing among what they found took
        `cost_ms`, and what was chosen is expected to save `worth_ms`."""
        self._seen += 1
        rate = max(_LEARNING_RATE, 1.0 / self._seen)
        self._worth_ms += rate * (worth_ms - self._worth_ms)
        self._cost_ms += rate * (cost_ms - self._cost_ms)
        worth = max(self._worth_ms, _SUDDEN * worth_ms)
        if self._seen >= _FIRST_STEPS and worth < self._cost_ms:
            self._rest_steps = _REST_STEPS
