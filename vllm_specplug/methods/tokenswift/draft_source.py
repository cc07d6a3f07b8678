# SPDX-License-Identifier: Apache-2.0
"""Choosing what to draft from by what it brings: tokens per millisecond of whole steps.

A step of a drafting source takes its draft, the verification and all that lies between; how many
tokens it yields depends on the text. Both are measured while serving, so that nothing has to be
known of the machine or the context: the source with the best rate is used, and the others are
tried again for a few steps, less often the more often and the more clearly they lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Weight of the past in the running averages.
_DECAY = 0.9
# Steps of one trial. The first ones include the cost of changing the source and are not counted.
_TRIAL_STEPS = 8
_UNCOUNTED_STEPS = 2
_FIRST_INTERVAL = 48
_LONGEST_INTERVAL = 512
# Below this share of the winner's rate a trial is lost clearly, as that of a draft forward is while
# verification costs as little as decoding; the next one then waits twice as long.
_GIVE_UP_SHARE = 0.75


@dataclass
class SourceRate:
    """Running averages of one source."""

    tokens: float = 0.0
    milliseconds: float = 0.0
    interval: int = _FIRST_INTERVAL
    """Steps until the next trial after one that did not win."""
    due: int = _FIRST_INTERVAL

    @property
    def is_known(self) -> bool:
        return self.milliseconds > 0

    @property
    def rate(self) -> float:
        """Tokens per millisecond and request."""
        return self.tokens / self.milliseconds if self.is_known else 0.0

    def observe(self, tokens: float, milliseconds: float) -> None:
        """Takes in one step."""
        if self.is_known:
            self.tokens += (1 - _DECAY) * (tokens - self.tokens)
            self.milliseconds += (1 - _DECAY) * (milliseconds - self.milliseconds)
        else:
            self.tokens, self.milliseconds = tokens, milliseconds


class SourceChooser:
    """Chooses among `sources`, the first one until another has proved better.

    Decisions only depend on the arguments: given the same ones, ranks decide alike.
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
        """What the step drafted from `current` yielded per request, and took in all.

        Args:
            source: of a step that is known late; it counts if `current` has not changed since.
        """
        if source not in (None, self.current):
            return
        if self._in_row > _UNCOUNTED_STEPS or len(self.sources) == 1:
            self.rates[self.current].observe(tokens, milliseconds)

    def choose(self, available: Sequence[str]) -> str:
        """The source of the next step, out of the `available` ones (at least one)."""
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
        """Ends a trial: the better source is used from now on, the other tried less often."""
        loser = tried
        if self.rates[tried].rate > self.rates[self.best].rate:
            loser, self.best = self.best, tried
            self.rates[loser].interval = _FIRST_INTERVAL
        lost = self.rates[loser]
        if lost.rate < _GIVE_UP_SHARE * self.rates[self.best].rate:
            lost.interval = min(2 * lost.interval, _LONGEST_INTERVAL)
        lost.due = self._steps + lost.interval
        lost.interval = min(2 * lost.interval, _LONGEST_INTERVAL)

    def _use(self, source: str) -> str:
        self._in_row = self._in_row + 1 if source == self.current else 1
        self.current = source
        return source
