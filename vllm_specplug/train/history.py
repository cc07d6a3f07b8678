# SPDX-License-Identifier: Apache-2.0
"""The held-out results of a run by step: history.jsonl, and a plot of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HISTORY_NAME, PLOT_NAME = "history.jsonl", "history.png"


def add_to_history(folder: Path, row: dict[str, Any]) -> None:
    """Adds the results at a step, and plots their curves once there are two steps.

    Args:
        row: with `step`, and `curves`: a mean acceptance length by name.
    """
    path = folder / HISTORY_NAME
    rows = []
    if path.is_file():
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # A resumed run does the steps after its last save again.
    rows = [*(old for old in rows if old["step"] < row["step"]), row]
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)
    if len(rows) > 1:
        _plot(rows, folder / PLOT_NAME)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in rows[-1]["curves"]:
        points = [(row["step"], row["curves"][name]) for row in rows if name in row["curves"]]
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set(xlabel="step", ylabel="mean acceptance length of chains")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
