# SPDX-License-Identifier: Apache-2.0
"""A self-contained HTML page of results: charts as SVG, all numbers as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vllm_specplug.bench.cells import MIX
from vllm_specplug.bench.charts import all_series, panels
from vllm_specplug.bench.figures import system_colors
from vllm_specplug.bench.load import BURST, IDLE
from vllm_specplug.bench.plan import BASELINE
from vllm_specplug.bench.summary import SPEED_UP, crossover, nodes_of
from vllm_specplug.bench.tables import format_number

_ASSETS = Path(__file__).resolve().parent / "assets"
# Loads of two results are the same if their rates differ by at most this share.
_SAME_RATE = 0.1

Results = Mapping[str, Any]


def write_page(runs: Sequence[Results], path: Path) -> Path:
    """Writes the page of one run, or of two to compare; returns `path`. The page has no external
    links and no scripts."""
    assert 1 <= len(runs) <= 2
    labels = _labels(runs)
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"better": _better, "number": format_number}
    page = environment.get_template("report.html.j2").render(
        css=(_ASSETS / "report.css").read_text(),
        title=_title(runs, labels),
        subtitle=_subtitle(runs),
        labels=labels,
        colors=system_colors(entry["name"] for run in runs for entry in run["servers"]),
        cards=_cards(runs, labels),
        series=all_series(runs, labels),
        panels=panels(runs, labels),
        comparison=_comparison(runs) if len(runs) == 2 else None,
        runs=[
            {**run, "label": label, "rows": _load_rows(run)}
            for run, label in zip(runs, labels, strict=True)
        ],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path


def _better(ratio: float | None) -> str:
    """Returns the CSS class of a ratio, for which larger is better."""
    if ratio is None or 0.98 <= ratio <= 1.02:
        return ""
    return "good" if ratio > 1 else "bad"


def _labels(runs: Sequence[Results]) -> list[str]:
    """Returns names of the runs: their commits, with letters if they are equal."""
    commits = [str(run["provenance"]["commit"])[:7] for run in runs]
    if len(set(commits)) < len(runs):
        return [f"{commit} ({letter})" for commit, letter in zip(commits, "AB", strict=False)]
    return commits


def _title(runs: Sequence[Results], labels: Sequence[str]) -> str:
    model = runs[0]["plan"]["model"]
    if len(runs) == 1:
        return f"{model}: speculation under load"
    return f"{model}: {labels[0]} and {labels[1]} under load"


def _subtitle(runs: Sequence[Results]) -> list[str]:
    plan, hardware = runs[0]["plan"], runs[0]["provenance"]["hardware"]
    machine = hardware.get("gpus") or [
        f"{hardware['cpu']}, {hardware['logical_cpus']} logical CPUs"
    ]
    return [
        plan["dtype"],
        *([plan["execution"]] if "execution" in plan else []),
        "greedy" if plan["temperature"] == 0 else f"temperature {plan['temperature']:g}",
        f"answers up to {plan['output_len']} tokens",
        f"prompts of {', '.join(plan['data'])}",
        ", ".join(machine),
    ]


def _cards(runs: Sequence[Results], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a card per server: its speed-up under the lightest load, and its crossover."""
    return [
        {
            "server": entry["name"],
            "name": entry["name"] if len(runs) == 1 else f"{entry['name']} · {label}",
            **_card_body(run, entry),
        }
        for run, label in zip(runs, labels, strict=True)
        for entry in run["servers"]
        if entry["name"] != BASELINE
    ]


def _card_body(run: Results, entry: Mapping[str, Any]) -> dict[str, Any]:
    points = {p["level"]: p for p in run["points"] if p["server"] == entry["name"]
              and p["prompts"] == MIX and p["speed_up"][SPEED_UP] is not None}  # fmt: skip
    if not points:
        return {"left_out": (entry["failure"] or "not measured").splitlines()[0]}
    light = points.get(IDLE.key) or next(iter(points.values()))
    facts = [("speed-up at", "idle" if light["level"] == IDLE.key else light["label"])]
    if any(p["x"] is not None for p in points.values()):
        text = crossover(run["points"], entry["name"])["text"]
        facts.append(("slower from", text.removeprefix("slower from ")))
    burst = points.get(BURST.key)
    if burst is not None and burst["speed_up"]["output_throughput"] is not None:
        facts.append(("saturated", f"{burst['speed_up']['output_throughput']:.2f}× tokens/s"))
    length = (light["spec"] or {}).get("mean_acceptance_length")
    if length:
        facts.append(("tokens per step", f"{length:.2f}"))
    if entry["failure"]:
        facts.append(("incomplete", entry["failure"].splitlines()[0][:60]))
    return {"left_out": None, "speed_up": light["speed_up"][SPEED_UP], "facts": facts}


def _load_name(point: Mapping[str, Any]) -> str:
    if point["prompts"] != MIX:
        return f"{point['prompts']}, {point['label']}"
    return "idle" if point["level"] == IDLE.key and point["x"] is not None else point["label"]


def _load_rows(run: Results) -> list[dict[str, Any]]:
    """Returns the table of all loads, from light to heavy."""
    names = [entry["name"] for entry in run["servers"]]
    points = sorted(
        run["points"],
        key=lambda p: (p["prompts"] != MIX, p["prompts"], p["order"], names.index(p["server"])),
    )
    rows = []
    for point, following in zip(points, [*points[1:], None], strict=False):
        numbers = [
            (point["output_throughput"], 1),
            (point["p50_ttft_ms"], 0),
            (point["p50_tpot_ms"], 1),
            (point["p99_tpot_ms"], 1),
            (point["p50_e2el_ms"], 0),
            ((point["spec"] or {}).get("mean_acceptance_length"), 2),
            (nodes_of(point), 1),
        ]
        if run["plan"]["goodput"]:
            numbers.append((point["request_goodput"], 2))
        ends_load = following is not None and any(
            point[key] != following[key] for key in ("prompts", "level")
        )
        rows.append(
            {
                "server": point["server"],
                "load": _load_name(point),
                "speed_up": point["speed_up"][SPEED_UP],
                "numbers": numbers,
                "ends_load": ends_load,
            }
        )
    return rows


def same_load(a: Mapping[str, Any], points: Iterable[Mapping[str, Any]]) -> Any:
    """Returns the point of `points` with the server, prompts and load of `a`, or None. Rates match
    if they differ by at most 10 %."""
    near = [
        p
        for p in points
        if p["server"] == a["server"]
        and p["prompts"] == a["prompts"]
        and (
            p["level"] == a["level"]
            or (
                p["level"].startswith("rate=")
                and a["level"].startswith("rate=")
                and abs(p["x"] / a["x"] - 1) <= _SAME_RATE
            )
        )
    ]
    return min(near, key=lambda p: abs((p["x"] or 0) - (a["x"] or 0)), default=None)


def _comparison(runs: Sequence[Results]) -> list[dict[str, Any]]:
    """Returns the loads of both runs. With a ratio above 1 the second run is better."""
    rows = []
    for first in runs[0]["points"]:
        second = same_load(first, runs[1]["points"])
        if second is None:
            continue
        numbers = []
        for key, digits, more_is_better in (
            ("output_throughput", 1, True), ("p50_tpot_ms", 1, False), ("p50_e2el_ms", 0, False),
        ):  # fmt: skip
            x, y = first[key], second[key]
            ratio = None if not x or not y else (y / x if more_is_better else x / y)
            numbers.append({"first": x, "second": y, "digits": digits, "ratio": ratio})
        mixed = first["prompts"] == MIX
        load = first["label"] if mixed else f"{first['prompts']}, {first['label']}"
        rows.append({"server": first["server"], "load": load, "numbers": numbers})
    return rows
