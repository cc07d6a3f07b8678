# SPDX-License-Identifier: Apache-2.0
"""Computes weights for requests that drafts have slowed down.

All requests of a step wait for all of its rows, so a request whose drafts are rarely accepted gets
its tokens later than with plain decoding. While it lags behind plain decoding, its tokens have a
higher weight, and the nodes of other requests need a higher probability to be chosen.
"""

from __future__ import annotations

import numpy as np

from vllm_specplug.budget import Floats, Ints

GAIN = 20.0
"""Increase of the weight per lag, a share of the request's tokens: a lag of 5 % doubles it."""
MAX_WEIGHT = 4.0
"""Maximum weight. With a higher one, a single request could prevent the drafts of all others."""
_PRIOR_TOKENS = 8.0
"""Tokens that every request is assumed to have got in time, so one expensive step counts little."""


class FairnessWeights:
    """Counts the tokens of each request, and those that plain decoding would have emitted.

    Requests that may not draft share one entry. It is reset when there are none.
    """

    def __init__(self) -> None:
        # [slots + 1] tokens that plain decoding would have emitted, and tokens emitted. The last
        # entry is for all requests that may not draft.
        self._due = np.zeros(64)
        self._emitted = np.zeros(64)

    def reset(self, slot: int) -> None:
        """Gives this slot to a new request."""
        while slot >= len(self._due) - 1:
            more = np.zeros(len(self._due))
            self._due = np.concatenate([self._due[:-1], more, self._due[-1:]])
            self._emitted = np.concatenate([self._emitted[:-1], more, self._emitted[-1:]])
        self._due[slot] = self._emitted[slot] = 0.0

    def step(
        self,
        # [R] requests that might draft, -1 for ended ones
        slots: Ints,
        # rows that yield a token, of these requests and of all others
        num_roots: int,
        # milliseconds of the step relative to a plain one
        ratio: float,
    ) -> None:
        """Counts a step with one token per request."""
        slots = slots[slots >= 0]
        if num_roots > len(slots):
            slots = np.append(slots, -1)
        else:
            self._due[-1] = self._emitted[-1] = 0.0
        self._due[slots] += ratio
        self._emitted[slots] += 1.0

    def accepted(self, slots: Ints, counts: Ints) -> None:
        """Counts the accepted draft tokens of each request."""
        self._emitted[slots] += counts

    def weights(self, slots: Ints, num_roots: int) -> Floats:
        """Returns [R] the weight of a token of each request, with a mean of 1 over all `num_roots`
        requests."""
        slots = np.append(slots, -1)
        due, emitted = self._due[slots], self._emitted[slots]
        lag = (due - emitted) / (emitted + _PRIOR_TOKENS)
        weights = np.clip(1.0 + GAIN * lag, 1.0, MAX_WEIGHT)
        own, others = weights[:-1], max(0, num_roots - len(slots) + 1) * weights[-1]
        result: Floats = own * (num_roots / (own.sum() + others))
        return result
