# SPDX-License-Identifier: Apache-2.0
"""A progress bar on a terminal, otherwise one line per event."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class SweepProgress:
    """Progress of a sweep, as a context manager."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console = console
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total, completed=done)

    def __enter__(self) -> SweepProgress:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def advance(self, total: int, done: int) -> None:
        """Sets the number of finished runs."""
        self._progress.update(self._task, total=total, completed=done)

    def status(self, text: str) -> None:
        """Shows the current activity, on a terminal only."""
        self._progress.update(self._task, description=text[: max(20, self._console.width - 50)])

    def say(self, message: str) -> None:
        """Prints a message above the bar."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)
