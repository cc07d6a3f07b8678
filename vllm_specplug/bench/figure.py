# SPDX-License-Identifier: Apache-2.0
"""The figure of a benchmark: what each server does under each load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vllm_specplug.bench.cells import MIX
from vllm_specplug.bench.load import BURST, IDLE
from vllm_specplug.bench.plan import BASELINE
from vllm_specplug.bench.summary import SPEED_UP, nodes_of

FIGURE_NAME = "results.svg"

Point = Mapping[str, Any]
PANELS: dict[str, Callable[[Point], float | None]] = {
    "speed-up over plain (end to end)": lambda point: point["speed_up"][SPEED_UP],
    "time per output token, ms": lambda point: point["p50_tpot_ms"],
    "tokens per second": lambda point: point["output_throughput"],
    "nodes per request and step": nodes_of,
}


def draw(results: Mapping[str, Any]) -> Figure | None:
    """Returns the figure of results (see `summarize`); None for fewer than two loads.

    The x axis is the request rate, or the number of requests in flight if fewer than two rates were
    measured. The rightmost point of a rate axis has all requests at once.
    """
    points = [point for point in results["points"] if point["prompts"] == MIX]
    rates = len({point["x"] for point in points} - {None}) > 1
    key = "x" if rates else "concurrency"
    ticks = {point[key]: _tick(point, rates) for point in points if point[key] is not None}
    if len(ticks) < 2:
        return None
    burst = None
    if rates and any(point["level"] == BURST.key for point in points):
        burst = 1.7 * max(ticks)
        ticks[burst] = "all\nat once"
    others = [entry["name"] for entry in results["servers"] if entry["name"] != BASELINE]
    colors = {BASELINE: "0.5", **{name: f"C{place}" for place, name in enumerate(others)}}
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axis, (title, value) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for server, color in colors.items():
            found = {
                burst if point["level"] == BURST.key else point[key]: value(point)
                for point in points
                if point["server"] == server
            }
            # Plain decoding is the dashed line among the speed-ups.
            is_reference = server == BASELINE and axis is figure.axes[0]
            if any(number is not None for number in found.values()) and not is_reference:
                xy = _broken_line(found, sorted(ticks), burst)
                axis.plot(*zip(*xy, strict=True), marker="o", label=server, color=color)
        axis.set_title(title)
        axis.set_xscale("log")
        axis.set_xticks(list(ticks), list(ticks.values()))
        axis.minorticks_off()
        axis.set_xlabel("requests per second" if rates else "requests in flight")
        axis.grid(axis="y", alpha=0.4)
    speed_ups, *_ = figure.axes
    speed_ups.axhline(1.0, color="0.4", linewidth=1, linestyle="--")
    for server, crossover in results["crossover"].items():
        if rates and crossover["rate"]:
            speed_ups.plot(crossover["rate"], 1.0, "D", color=colors[server], fillstyle="none")
    figure.legend(*figure.axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _tick(point: Point, rates: bool) -> str:
    if rates:
        return "idle" if point["level"] == IDLE.key else f"{point['x']:.3g}"
    return str(point["concurrency"])


def _broken_line(
    values: Mapping[float | None, float | None], places: list[float], burst: float | None
) -> list[tuple[float, float]]:
    """Returns the points of a line that joins only neighbours: NaN ends it at a load without a
    value, and before all requests at once, which is not a rate."""
    points = []
    for place in places:
        if place == burst:
            points.append((place, math.nan))
        value = values.get(place)
        points.append((place, math.nan if value is None else value))
    return points


def write_figure(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes results.svg; returns its path, or nothing for fewer than two loads."""
    figure = draw(results)
    if figure is None:
        return []
    path = folder / FIGURE_NAME
    figure.savefig(path)
    return [path]
