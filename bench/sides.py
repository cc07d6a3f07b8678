# SPDX-License-Identifier: Apache-2.0
"""Sides of a comparison that need processes of their own, as what differs is decided at start.

All processes live as long as the comparison and measure in turns, seconds apart: whatever else the
machine does for longer affects all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

_MARK = "measured: "

Round = dict[str, dict[str, Any]]
"""Values by side and batch size."""


class Side:
    """A process whose engine measures when it is asked.

    Args:
        script: calls `answer` when it is started with `flags`.
        env: added to the environment.
    """

    def __init__(self, script: str, flags: Sequence[str], env: Mapping[str, str]) -> None:
        # Open for as long as the process writes to it.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, script, "--allow-changes", *flags],
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def measure(self, batch: int) -> Any:
        """What the process measures for a batch of this size."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        self._errors.seek(0)
        raise SystemExit(f"a side ended:\n{self._errors.read()[-4000:]}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def answer(measure: Callable[[int], Any]) -> None:
    """The part of a side's process: measures batch sizes as they are asked for. What it measures
    is a number, or several by name."""
    for line in sys.stdin:
        print(_MARK + json.dumps(measure(int(line))), flush=True)


def in_turns(
    make_side: Callable[[str], Side], sides: Sequence[str], batches: Sequence[int], rounds: int
) -> list[Round]:
    """Every side once per round and batch size; which goes first alternates. A round before the
    first warms up and is not returned."""
    running: dict[str, Side] = {}
    found: list[Round] = []
    try:
        for side in sides:
            running[side] = make_side(side)
            running[side].measure(batches[0])
        for number in range(1 + rounds):
            values: Round = {side: {} for side in sides}
            for batch in batches:
                for side in sides[:: 1 - 2 * (number % 2)]:
                    values[side][str(batch)] = running[side].measure(batch)
            found.append(values)
            print(f"round {number} of {rounds}", file=sys.stderr)
    finally:
        for side in running.values():
            side.end()
    return found[1:]


def table(
    rounds: Sequence[Round], sides: Sequence[str], batches: Iterable[int], digits: int
) -> list[list[str]]:
    """One line for each batch size: medians over the rounds, and the medians of the rounds' ratios
    to the first side; in brackets the lowest and the highest."""

    def cell(values: Sequence[float], digits: int, unit: str = "") -> str:
        low, high = min(values), max(values)
        return f"{median(values):.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"

    lines = []
    for batch in map(str, batches):
        first = [values[sides[0]][batch] for values in rounds]
        of_sides = [[values[side][batch] for values in rounds] for side in sides]
        ratios = [
            [value / base for value, base in zip(own, first, strict=True)] for own in of_sides[1:]
        ]
        lines.append(
            [batch, *(cell(own, digits) for own in of_sides), *(cell(r, 2, " x") for r in ratios)]
        )
    return lines
