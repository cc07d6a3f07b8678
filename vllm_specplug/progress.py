# SPDX-License-Identifier: Apache-2.0
"""Progress bars of long commands."""

from __future__ import annotations

import os

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, ProgressColumn, Task
from rich.text import Text

# By default rich forgets updates after 30 seconds: tasks of longer steps would have no rate.
_RATE_PERIOD_S = 24 * 3600.0


class _Rate(ProgressColumn):
    """The rate of a task."""

    def render(self, task: Task) -> Text:
        speed = task.speed
        if speed is None:
            return Text("")
        return Text(f"{speed:,.1f}/s" if speed >= 1 else f"{60 * speed:,.1f}/min")


def progress(console: Console | None = None) -> Progress:
    """Returns a progress bar with counts, rate and remaining time; only the main process of several
    shows it."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), _Rate())
    return Progress(
        *columns,
        console=console,
        disable=not is_main_process(),
        speed_estimate_period=_RATE_PERIOD_S,
    )


def is_main_process() -> bool:
    """Whether this is the main process of an `accelerate launch`, or the only one."""
    return os.environ.get("RANK", "0") == "0"
