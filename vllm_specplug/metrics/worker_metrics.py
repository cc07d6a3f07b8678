# SPDX-License-Identifier: Apache-2.0
"""The metrics of a worker: the runner calls them once per step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from vllm_specplug.metrics.step_stats import PHASES, Payload, StepStats
from vllm_specplug.metrics.watchdog import AcceptanceWatchdog

# Below "vllm", so that vLLM's handler, format and level apply.
_logger = logging.getLogger("vllm.specplug")

_LOGGED_DEPTHS = 10


class SpecPlugMetrics:
    """Statistics of one worker. Callers add to `stats`, and the runner calls `end_step`."""

    def __init__(
        self,
        *,
        head: str = "the draft head",
        log_interval_s: float = 10.0,
        is_reporting: bool = True,
        logger: logging.Logger = _logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            head: name of the draft head in the watchdog's warning.
            is_reporting: whether this worker logs: only the first tensor parallel rank does.
        """
        self.stats = StepStats()
        self._interval = StepStats()
        self._log_interval_s = log_interval_s
        self._is_reporting = is_reporting
        self._logger = logger
        self._clock = clock
        self._interval_start: float | None = None
        self._watchdog = AcceptanceWatchdog(logger, head=head)

    def end_step(self) -> Payload | None:
        """Drains `stats`, logs if an interval has passed, and returns the step's payload.

        Call it at the end of every step, because lists in `stats` grow until they are drained.
        """
        payload = self.stats.drain()
        if not self._is_reporting or payload is None:
            return payload
        self._interval.merge(payload)
        accepted = sum(payload.get("accepted_by_depth", ()))
        self._watchdog.observe(payload.get("num_drafts", 0), accepted)
        now = self._clock()
        if self._interval_start is None:
            # The first step begins the first interval: idle time before it does not count.
            self._interval_start = now
        elif now - self._interval_start >= self._log_interval_s:
            self._logger.info("%s", format_interval(self._interval))
            self._interval = StepStats()
            self._interval_start = now
        return payload


def format_interval(stats: StepStats) -> str:
    """Returns a log line: acceptance, share of drafts accepted to each depth, the budget and how
    well it predicts, mean milliseconds by phase, and decode steps without a tree by reason."""
    parts = []
    if stats.num_drafts:
        drafts = stats.num_drafts
        parts.append(
            f"mean acceptance length {stats.mean_acceptance_length:.2f} "
            f"(accepted {stats.num_accepted / drafts:.2f} of {stats.num_nodes / drafts:.1f} nodes)"
        )
        if stats.accepted_by_depth:
            shares = [f"{count / drafts:.2f}" for count in stats.accepted_by_depth]
            more = " ..." if len(shares) > _LOGGED_DEPTHS else ""
            parts.append("by depth " + " ".join(shares[:_LOGGED_DEPTHS]) + more)
    else:
        parts.append("no trees verified")
    if stats.tree_budget is not None:
        budget = f"budget now {stats.tree_budget}"
        if stats.step_nodes:
            budget += f", nodes per step {sum(stats.step_nodes) / len(stats.step_nodes):.1f}"
        if stats.predicted_accepted:
            ratio = stats.predicted_actual / stats.predicted_accepted
            budget += f", accepted / predicted {ratio:.2f}"
        parts.append(budget)
    timings = [
        f"{phase} {_three_digits(sum(values) / len(values))} ms"
        for phase in PHASES
        if (values := stats.milliseconds.get(phase))
    ]
    if timings:
        parts.append(" ".join(timings))
    if stats.plain_steps:
        total = sum(stats.plain_steps.values())
        reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(stats.plain_steps.items()))
        parts.append(f"plain steps {total} ({reasons})")
    return "specplug: " + " | ".join(parts)


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"
