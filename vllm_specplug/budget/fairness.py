# SPDX-License-Identifier: Apache-2.0
"""How each request fares beside plain decoding, and what that makes its tokens count.

All requests of a step wait for the rows of all. A request whose drafts are seldom accepted pays for
those of the others: the sum of tokens grows while its own come later than they would plainly. What
it is behind raises the weight of its tokens, so that rows of others must promise more until it has
caught up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_specplug.budget.cost_curve import Floats

Ints = npt.NDArray[np.int64]

GAIN = 20.0
"""Weight for being behind by all of one's tokens: at 5 % a token counts twice."""
MAX_WEIGHT = 4.0
"""Largest weight. More would let one hopeless request forbid drafts to all others."""
_PRIOR_TOKENS = 8.0
"""Tokens on time that every request is taken to begin with: one dear step is no trend."""


class FairnessWeights:
    """Tokens of each request beside those that plain decoding would have given it meanwhile.

    Requests that may not draft share one entry, which is reset whenever there are none.
    """

    def __init__(self) -> None:
        # [slots + 1] tokens that plain decoding would have given, and tokens; last those of all
        # requests that may not draft.
        self._due = np.zeros(64)
        self._emitted = np.zeros(64)

    def reset(self, slot: int) -> None:
        """A new request took this slot."""
        while slot >= len(self._due) - 1:
            more = np.zeros(len(self._due))
            self._due = np.concatenate([self._due[:-1], more, self._due[-1:]])
            self._emitted = np.concatenate([self._emitted[:-1], more, self._emitted[-1:]])
        self._due[slot] = self._emitted[slot] = 0.0

    def step(
        self,
        # [R] requests that might draft, -1 for ended ones
        slots: Ints,
        # rows that yield a token: of these requests and of all others
        num_roots: int,
        # milliseconds of the step over those of a plain one
        ratio: float,
        steps: int = 1,
    ) -> None:
        """A step, or several alike, gives every request one token, later than plain decoding would
        have."""
        slots = slots[slots >= 0]
        if num_roots > len(slots):
            slots = np.append(slots, -1)
        else:
            self._due[-1] = self._emitted[-1] = 0.0
        self._due[slots] += ratio * steps
        self._emitted[slots] += steps

    def accepted(self, slots: Ints, counts: Ints) -> None:
        """So many drafted tokens of each request were accepted."""
        self._emitted[slots] += counts

    def weights(self, slots: Ints, num_roots: int) -> Floats:
        """[R] what a token of each request counts, 1 on average over all `num_roots` requests."""
        slots = np.append(slots, -1)
        due, emitted = self._due[slots], self._emitted[slots]
        behind = (due - emitted) / (emitted + _PRIOR_TOKENS)
        weights = np.clip(1.0 + GAIN * behind, 1.0, MAX_WEIGHT)
        own, others = weights[:-1], max(0, num_roots - len(slots) + 1) * weights[-1]
        result: Floats = own * (num_roots / (own.sum() + others))
        return result
