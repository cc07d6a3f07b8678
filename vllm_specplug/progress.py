# SPDX-License-Identifier: Apache-2.0
"""Progress bars of long commands."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, ProgressColumn, Task
from rich.text import Text

# By default rich forgets updates after 30 seconds: tasks of longer steps would have no rate.
_RATE_PERIOD_S = 24 * 3600.0
# Time between the lines of a bar whose output is not a terminal.
_LINE_PERIOD_S = 60.0


class _Rate(ProgressColumn):
    """The rate of a task."""

    def render(self, task: Task) -> Text:
        speed = task.speed
        if speed is None:
            return Text("")
        return Text(f"{speed:,.1f}/s" if speed >= 1 else f"{60 * speed:,.1f}/min")


class _Bar(Progress):
    """A progress bar that prints a line now and then if the output is not a terminal."""

    _printed = 0.0

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self._print()

    def advance(self, *args: Any, **kwargs: Any) -> None:
        super().advance(*args, **kwargs)
        self._print()

    def _print(self) -> None:
        now = self.get_time()
        if not (self.disable or self.finished or self.console.is_terminal):
            if now - self._printed >= _LINE_PERIOD_S:
                self._printed = now
                self.console.print(self.get_renderable())


def progress(console: Console | None = None) -> Progress:
    """Returns a progress bar with counts, rate and remaining time; only the main process of several
    shows it. It prints a line per minute if the output is not a terminal."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), _Rate())
    return _Bar(
        *columns,
        console=console,
        disable=not is_main_process(),
        speed_estimate_period=_RATE_PERIOD_S,
    )


def is_main_process() -> bool:
    """Whether this is the main process of an `accelerate launch`, or the only one."""
    return os.environ.get("RANK", "0") == "0"
