# SPDX-License-Identifier: Apache-2.0
"""Charts of a report page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from vllm_specplug.bench.cells import MIX
from vllm_specplug.bench.figures import COLORS, new_figure, place_measured, system_colors, to_svg
from vllm_specplug.bench.load import BURST, IDLE
from vllm_specplug.bench.plan import BASELINE
from vllm_specplug.bench.summary import SPEED_UP, nodes_of

Point = Mapping[str, Any]
Value = Callable[[Point], float | None]

_PHASES = {"draft": "#d4680a", "verify": "#2f66d0", "compact": "#8b49c4"}
_PHASE_NAMES = {"draft": "draft", "verify": "verify", "compact": "move KV"}
_REST_COLOR = COLORS["plain"]
_LATENCIES = {"e2el": "end to end", "tpot": "per token", "ttft": "first token"}


@dataclass(frozen=True)
class Panel:
    """Related charts, as SVG by title."""

    title: str
    about: str
    charts: dict[str, str]


@dataclass(frozen=True)
class Series:
    """Results of a server in a run."""

    run: int
    name: str
    label: str
    color: str
    points: Sequence[Point]
    crossover: float | None

    @property
    def style(self) -> dict[str, Any]:
        """Line style; a second run is dashed with hollow marks."""
        second = {"linestyle": "--", "markerfacecolor": "none"} if self.run else {}
        return {"color": self.color, "marker": "o", **second}


@dataclass(frozen=True)
class _Loads:
    """An x axis of loads: its title, and the position of a point or None."""

    title: str
    place: Value


_AXES = (
    _Loads("requests per second", lambda p: p["x"]),
    _Loads("requests in flight", lambda p: p["concurrency"]),
)


def all_series(runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[Series]:
    """Returns the measured servers of all runs."""
    colors = system_colors(entry["name"] for run in runs for entry in run["servers"])
    return [
        Series(
            run=number,
            name=entry["name"],
            label=entry["name"] if len(runs) == 1 else f"{entry['name']} · {labels[number]}",
            color=colors[entry["name"]],
            points=points,
            crossover=(run["crossover"].get(entry["name"]) or {}).get("rate"),
        )
        for number, run in enumerate(runs)
        for entry in run["servers"]
        if (points := [p for p in run["points"] if p["server"] == entry["name"]])
    ]


def panels(runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[Panel]:
    """Returns the panels with results."""
    series = all_series(runs, labels)
    found = [panel for loads in _AXES for panel in _by_load(series, loads, runs[0]["plan"])]
    found += [_time_shares(series), _by_depth(series), _by_data_set(series)]
    return [panel for panel in found if panel.charts]


def _by_load(series: Sequence[Series], loads: _Loads, plan: Mapping[str, Any]) -> list[Panel]:
    mixed = [p for one in series for p in one.points if p["prompts"] == MIX]
    if len({loads.place(p) for p in mixed} - {None}) < 2:
        return []
    others = [one for one in series if one.name != BASELINE]
    served = {"tokens/s": "output_throughput", "requests/s": "request_throughput"}
    about = "Below saturation, throughput equals the offered load."
    if plan["goodput"]:
        served["good requests/s"] = "request_goodput"
        goals = ", ".join(goal.replace(":", " ≤ ") + " ms" for goal in plan["goodput"])
        about += f" Good requests meet {goals}."
    speed_ups = {"end to end": SPEED_UP, "per token": "p50_tpot_ms",
                 "throughput": "output_throughput"}  # fmt: skip

    def lines(name: str, drawn: Sequence[Series], value: Value, **options: Any) -> str:
        return _line_chart(f"{loads.title}, {name}", drawn, loads, value, **options)

    by_latency = {
        f"{title}, {percent}": f"{'p50' if percent == 'median' else percent}_{key}_ms"
        for key, title in _LATENCIES.items()
        for percent in ("median", "p99")
    }
    found = [
        Panel(
            "Speed-up",
            "Ratio to plain vLLM under the same load. Speculation pays above the dashed line. A "
            "diamond marks the crossover.",
            {
                title: lines(f"speed-up {title}", others, _speed_up(key),
                             unit="×", reference=1.0, crossovers=key == SPEED_UP)
                for title, key in speed_ups.items()
            } if others else {},
        ),
        Panel(
            "Latency",
            "Times of requests in milliseconds. Lower is better.",
            {
                title: lines(title, series, itemgetter(key), log=True)
                for title, key in by_latency.items()
            },
        ),
        Panel(
            "Throughput",
            f"Tokens and requests per second. {about}",
            {
                title: lines(title, series, itemgetter(key), zero=True)
                for title, key in served.items()
            },
        ),
    ]  # fmt: skip
    drafting = [one for one in series if any(p["spec"] for p in one.points)]
    if drafting:
        found.append(
            Panel(
                "Draft size",
                "Nodes per request and step, counting steps without a draft as 0, and mean tokens "
                "per request and step with a draft.",
                {
                    "nodes": lines("nodes", drafting, nodes_of, zero=True),
                    "acceptance length": lines("acceptance length", drafting, _length),
                },
            )
        )
    return [Panel(f"{p.title} by {loads.title}", p.about, p.charts) for p in found]


def _speed_up(key: str) -> Value:
    return lambda point: point["speed_up"][key]


def _length(point: Point) -> float | None:
    return (point["spec"] or {}).get("mean_acceptance_length")


def _line_chart(
    name: str,
    drawn: Sequence[Series],
    loads: _Loads,
    value: Value,
    *,
    unit: str = "",
    log: bool = False,
    zero: bool = False,
    reference: float | None = None,
    crossovers: bool = False,
) -> str:
    """Returns a chart of values of the mixed traffic by load. The rightmost point has all requests
    at once."""
    figure, axis = new_figure()
    rates = loads is _AXES[0]
    points = [p for one in drawn for p in one.points if p["prompts"] == MIX]
    places = {place: p for p in points if (place := loads.place(p)) is not None}
    ticks = {x: _load_label(p, x, rates) for x, p in sorted(places.items())}
    burst = max(ticks) * 1.7
    if rates and any(p["level"] == BURST.key for p in points):
        ticks[burst] = "all\nat once"

    def position(p: Point) -> float | None:
        return burst if rates and p["level"] == BURST.key else loads.place(p)

    for one in drawn:
        found = {position(p): value(p) for p in one.points if p["prompts"] == MIX}
        measured = {
            x
            for other in drawn
            if other.run == one.run
            for p in other.points
            if p["prompts"] == MIX and (x := position(p)) is not None
        }
        # A line joins only neighbours: NaN ends it at a load where this server has no value, and
        # before all requests at once, which is not a rate.
        xy = [(x, math.nan if (y := found.get(x)) is None else y) for x in sorted(measured)]
        if rates and burst in measured:
            xy.insert(-1, (burst, math.nan))
        if any(y is not None for y in found.values()):
            axis.plot(*zip(*xy, strict=True), gid=f"{name}: {one.run}/{one.name}", **one.style)
        if crossovers and rates and one.crossover:
            axis.plot(
                one.crossover, 1.0, "D", color=one.color, markerfacecolor="white", markersize=7,
                gid=f"{name} crossover: {one.run}/{one.name}", zorder=4,
            )  # fmt: skip
    if reference is not None:
        axis.axhline(reference, color="#444b55", linewidth=1, linestyle="--")
    values = [y for p in points if (y := value(p))]
    if log and values and max(values) > 8 * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    elif zero:
        axis.set_ylim(bottom=0)
    if unit:
        axis.yaxis.set_major_formatter(f"{{x:g}}{unit}")
    place_measured(axis, ticks)
    axis.set_xlabel(loads.title)
    return to_svg(figure, name)


def _load_label(point: Point, place: float, rates: bool) -> str:
    return "idle" if rates and point["level"] == IDLE.key else f"{place:.3g}"


def _time_shares(series: Sequence[Series]) -> Panel:
    charts = {}
    for one in series:
        rows = [p for p in one.points if p["prompts"] == MIX and (p["spec"] or {}).get("share")]
        if not rows:
            continue
        rows.sort(key=lambda p: p["order"], reverse=True)
        figure, axis = new_figure(height=0.9 + 0.26 * len(rows))
        labels = [p["label"] for p in rows]
        left = [0.0] * len(rows)
        for phase, color in _PHASES.items():
            shares = [100 * p["spec"]["share"][phase] for p in rows]
            _bars(axis, f"share {phase} {one.run}/{one.name}", labels, shares, left, color,
                  _PHASE_NAMES[phase])  # fmt: skip
            left = [a + b for a, b in zip(left, shares, strict=True)]
        rest = [max(0.0, 100 - taken) for taken in left]
        _bars(axis, f"share rest {one.run}/{one.name}", labels, rest, left, _REST_COLOR, "rest")
        axis.set_xlim(0, 100)
        axis.xaxis.set_major_formatter("{x:g} %")
        axis.grid(False)
        axis.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
        charts[one.label] = to_svg(figure, f"shares {one.run}/{one.name}")
    about = "Share of wall time by part of a step; the rest is prefill, plain steps and idle time."
    return Panel("Where time goes", about, charts)


def _bars(
    axis: Axes, gid: str, labels: Sequence[str], sizes: Sequence[float], left: Sequence[float],
    color: str, name: str,
) -> None:  # fmt: skip
    for bar in axis.barh(labels, sizes, left=left, color=color, label=name, height=0.75):
        bar.set_gid(gid)


def _by_depth(series: Sequence[Series]) -> Panel:
    charts = {}
    for prompts in _data_sets(series, with_mix=True):
        figure, axis = new_figure()
        for one in series:
            shares = next(
                (s for p in one.points if p["prompts"] == prompts
                 and (s := (p["spec"] or {}).get("acceptance_by_depth"))), (),
            )  # fmt: skip
            if shares:
                depths = range(1, len(shares) + 1)
                percent = [100 * share for share in shares]
                axis.plot(
                    depths, percent, gid=f"depth {prompts}: {one.run}/{one.name}", **one.style
                )
        axis.set_ylim(0, 100)
        axis.yaxis.set_major_formatter("{x:g} %")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlabel("depth")
        charts["mixed prompts" if prompts == MIX else prompts] = to_svg(figure, f"depth {prompts}")
    return Panel("Acceptance by depth", "Share of drafts accepted to this depth or deeper.", charts)


def _by_data_set(series: Sequence[Series]) -> Panel:
    names = _data_sets(series, with_mix=False)
    drafting = [one for one in series if any(_length(p) for p in one.points if p["prompts"] != MIX)]
    if not names or not drafting:
        return Panel("Acceptance by data set", "", {})
    figure, axis = new_figure(height=0.7 + 0.22 * len(names) * (len(drafting) + 1))
    for place, one in enumerate(drafting):
        lengths = {p["prompts"]: length for p in one.points if (length := _length(p))}
        rows = [(i * (len(drafting) + 1) + place, lengths[n]) for i, n in enumerate(names)
                if n in lengths]  # fmt: skip
        bars = axis.barh(*zip(*rows, strict=True), color=one.color, height=0.85,
                         alpha=0.6 if one.run else 1.0)  # fmt: skip
        axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        for bar in bars:
            bar.set_gid(f"data set: {one.run}/{one.name}")
    middle = (len(drafting) - 1) / 2
    axis.set_yticks([i * (len(drafting) + 1) + middle for i in range(len(names))], names)
    axis.invert_yaxis()
    axis.grid(False)
    axis.margins(x=0.1)
    about = "Mean tokens per request and step: 1 + accepted / drafts."
    return Panel("Acceptance by data set", about, {"": to_svg(figure, "data sets")})


def _data_sets(series: Sequence[Series], with_mix: bool) -> list[str]:
    names = {p["prompts"] for one in series for p in one.points if (p["spec"] or {}).get("drafts")}
    return [*([MIX] if with_mix and MIX in names else []), *sorted(names - {MIX})]
