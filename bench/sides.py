# SPDX-License-Identifier: Apache-2.0
"""Sides of a comparison that need processes of their own, as what differs is decided at start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

# What a side measured: values by batch size, one for each repeat.
Measured = dict[str, list[float]]


def measured_in_process(
    script: str, flags: Sequence[str], env: Mapping[str, str]
) -> dict[str, Any]:
    """What `script`, started with `flags`, prints as JSON in its last line; its engine shares the
    process."""
    done = subprocess.run(
        [sys.executable, script, "--allow-changes", *flags],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **env},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(flags)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def in_turns(
    sides: Sequence[str], rounds: int, run: Callable[[str], Measured]
) -> list[dict[str, Measured]]:
    """Every side once per round; which goes first alternates."""
    found = []
    for number in range(rounds):
        found.append({side: run(side) for side in sides[:: 1 - 2 * (number % 2)]})
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return found


def table(
    rounds: Sequence[Mapping[str, Measured]],
    sides: Sequence[str],
    batches: Iterable[int],
    digits: int,
) -> list[list[str]]:
    """One line for each batch size: medians over all repeats, in brackets those of single
    processes, and the ratios to the first side."""
    lines = []
    for batch in map(str, batches):
        cells, medians = [], []
        for side in sides:
            each = sorted(median(r[side][batch]) for r in rounds)
            medians.append(median(t for r in rounds for t in r[side][batch]))
            spread = ", ".join(f"{t:.{digits}f}" for t in each)
            cells.append(f"{medians[-1]:.{digits}f} ({spread})")
        lines.append([batch, *cells, *(f"{m / medians[0]:.3f}" for m in medians[1:])])
    return lines
