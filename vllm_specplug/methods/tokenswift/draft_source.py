# SPDX-License-Identifier: Apache-2.0
"""Chooses the draft source by its measured rate: tokens per millisecond of complete steps.

A step takes the draft, the verification and the time between them; its number of tokens depends on
the text. Both are measured while serving, so nothing has to be known about the machine or the
context. The source with the best rate is used. The others are tried again for a few steps, less
often the more often and the more clearly they lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Weight of the past in the running averages.
_DECAY = 0.9
# Steps of one trial. The first ones include the cost of a new source and do not count.
_TRIAL_STEPS = 8
_UNCOUNTED_STEPS = 2
_FIRST_INTERVAL = 48
_MAX_INTERVAL = 512
# Below this share of the winner's rate a trial is clearly lost, for instance by a draft forward
# while verification costs no more than decoding. The next trial then waits twice as long.
_GIVE_UP_SHARE = 0.75


@dataclass
class SourceRate:
    """Running averages of one source."""

    tokens: float = 0.0
    milliseconds: float = 0.0
    interval: int = _FIRST_INTERVAL
    """Steps until the next trial after a lost one."""
    due: int = _FIRST_INTERVAL

    @property
    def is_known(self) -> bool:
        return self.milliseconds > 0

    @property
    def rate(self) -> float:
        """Tokens per millisecond and request."""
        return self.tokens / self.milliseconds if self.is_known else 0.0

    def observe(self, tokens: float, milliseconds: float) -> None:
        """Updates the averages with one step."""
        if self.is_known:
            self.tokens += (1 - _DECAY) * (tokens - self.tokens)
            self.milliseconds += (1 - _DECAY) * (milliseconds - self.milliseconds)
        else:
            self.tokens, self.milliseconds = tokens, milliseconds


class SourceChooser:
    """Chooses among `sources`, starting with the first one.

    Decisions depend only on the arguments, so ranks with equal arguments decide alike.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        assert sources
        self.sources = tuple(sources)
        self.rates = {source: SourceRate() for source in sources}
        self.best = self.sources[0]
        self.current = self.best
        self._steps = 0
        self._in_row = 0

    def observe(self, tokens: float, milliseconds: float, source: str | None = None) -> None:
        """Observes a step that drafted from `current`.

        Args:
            tokens: emitted tokens per request.
            milliseconds: duration of the step.
            source: the source of a step that is read late. The step counts only if `current` has
                not changed since.
        """
        if source not in (None, self.current):
            return
        if self._in_row > _UNCOUNTED_STEPS or len(self.sources) == 1:
            self.rates[self.current].observe(tokens, milliseconds)

    def choose(self, available: Sequence[str]) -> str:
        """Returns the source of the next step, one of `available` (at least one)."""
        self._steps += 1
        trying = self.current != self.best and self.current in available
        if trying and self._in_row < _TRIAL_STEPS + _UNCOUNTED_STEPS:
            return self._use(self.current)
        if trying:
            self._judge(self.current)
        best = self.best if self.best in available else available[0]
        for source in available:
            if source != best and self._steps >= self.rates[source].due:
                return self._use(source)
        return self._use(best)

    def _judge(self, tried: str) -> None:
        """Ends a trial: the better source becomes the best one, the other is tried less often."""
        loser = tried
        if self.rates[tried].rate > self.rates[self.best].rate:
            loser, self.best = self.best, tried
            self.rates[loser].interval = _FIRST_INTERVAL
        lost = self.rates[loser]
        if lost.rate < _GIVE_UP_SHARE * self.rates[self.best].rate:
            lost.interval = min(2 * lost.interval, _MAX_INTERVAL)
        lost.due = self._steps + lost.interval
        lost.interval = min(2 * lost.interval, _MAX_INTERVAL)

    def _use(self, source: str) -> str:
        self._in_row = self._in_row + 1 if source == self.current else 1
        self.current = source
        return source
