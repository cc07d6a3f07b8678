# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page from results: charts drawn in the page, tables written here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from vllm_specplug.bench.cells import MIX
from vllm_specplug.bench.load import BURST, IDLE
from vllm_specplug.bench.plan import BASELINE
from vllm_specplug.bench.summary import SPEED_UP, format_number

_ASSETS = Path(__file__).resolve().parent / "assets"
# Colour variables of report.css, by a server's place; the first is the baseline's.
_NUM_COLORS = 7
# Loads of two results count as the same when their rates are this near.
_SAME_RATE = 0.1

Results = Mapping[str, Any]


def write_page(runs: Sequence[Results], path: Path) -> Path:
    """Writes the page of one run, or of two to compare; returns `path`.

    The page has no link to anything outside itself.
    """
    assert 1 <= len(runs) <= 2
    labels = _labels(runs)
    data = [{**run, "label": label} for run, label in zip(runs, labels, strict=True)]
    assets = {name: (_ASSETS / f"report.{name}").read_text() for name in ("html", "css", "js")}
    # No "</script>" of the data may end the element that holds it.
    payload = json.dumps(data).replace("<", "\\u003c")
    page = Template(assets["html"]).substitute(
        title=html.escape(_title(runs, labels)),
        subtitle=_subtitle(runs),
        css=assets["css"],
        js=assets["js"],
        cards=_cards(runs, labels),
        tables=_tables(runs, labels),
        provenance="\n".join(_provenance(r, label) for r, label in zip(runs, labels, strict=True)),
        data=payload,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path


def _labels(runs: Sequence[Results]) -> list[str]:
    """What tells two runs apart: their commits, or their places."""
    commits = [str(run["provenance"]["commit"])[:7] for run in runs]
    if len(set(commits)) < len(runs):
        return [f"{commit} ({letter})" for commit, letter in zip(commits, "AB", strict=False)]
    return commits


def _title(runs: Sequence[Results], labels: Sequence[str]) -> str:
    model = runs[0]["plan"]["model"]
    if len(runs) == 1:
        return f"{model}: speculation under load"
    return f"{model}: {labels[0]} and {labels[1]} under load"


def _subtitle(runs: Sequence[Results]) -> str:
    plan, hardware = runs[0]["plan"], runs[0]["provenance"]["hardware"]
    machine = ", ".join(hardware.get("gpus") or [f"{hardware['cpu']}, {hardware['logical_cpus']} "
                                                 "logical CPUs"])  # fmt: skip
    sampling = "greedy" if plan["temperature"] == 0 else f"temperature {plan['temperature']:g}"
    parts = [plan["dtype"], sampling, f"answers up to {plan['output_len']} tokens",
             f"prompts of {', '.join(plan['data'])}", machine]  # fmt: skip
    return html.escape(" · ".join(parts))


def _color(runs: Sequence[Results], server: str) -> str:
    """The same colour as report.js gives."""
    names = list(dict.fromkeys(entry["name"] for run in runs for entry in run["servers"]))
    place = names.index(server)
    return f"var(--s{(place - 1) % _NUM_COLORS + 1 if place else 0})"


def _find(run: Results, server: str, level: str) -> Mapping[str, Any] | None:
    for entry in run["points"]:
        if (entry["server"], entry["prompts"], entry["level"]) == (server, MIX, level):
            return entry
    return None


# Cards


def _cards(runs: Sequence[Results], labels: Sequence[str]) -> str:
    """One card a server: its speed-up under the lightest load, and where it ends."""
    cards = []
    for run, label in zip(runs, labels, strict=True):
        for entry in run["servers"]:
            name = entry["name"]
            if name == BASELINE:
                continue
            shown = name if len(runs) == 1 else f"{name} · {label}"
            cards.append(
                f'<div class="card" style="--c: {_color(runs, name)}">'
                f'<div class="name">{html.escape(shown)}</div>{_card_body(run, entry)}</div>'
            )
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _card_body(run: Results, entry: Mapping[str, Any]) -> str:
    points = [p for p in run["points"] if p["server"] == entry["name"] and p["prompts"] == MIX
              and p["speed_up"][SPEED_UP] is not None]  # fmt: skip
    if not points:
        why = (entry["failure"] or "not measured").splitlines()[0]
        return f'<p class="why">left out: {html.escape(why)}</p>'
    light = _find(run, entry["name"], IDLE.key) or points[0]
    value = light["speed_up"][SPEED_UP]
    where = "idle" if light["level"] == IDLE.key else light["label"]
    rows = [("speed-up at", where)]
    crossover = run["crossover"].get(entry["name"])
    if crossover and any(p["x"] is not None for p in points):
        rows.append(("slower from", crossover["text"].removeprefix("slower from ")))
    burst = _find(run, entry["name"], BURST.key)
    if burst is not None and burst["speed_up"]["output_throughput"] is not None:
        rows.append(("saturated", f"{burst['speed_up']['output_throughput']:.2f}× tokens/s"))
    length = (light["spec"] or {}).get("mean_acceptance_length")
    if length:
        rows.append(("tokens per step", f"{length:.2f}"))
    if entry["failure"]:
        rows.append(("incomplete", entry["failure"].splitlines()[0][:60]))
    items = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in rows)
    return f'<div class="big {_better(value)}">{value:.2f}×</div><dl>{items}</dl>'


def _better(ratio: float | None) -> str:
    if ratio is None or 0.98 <= ratio <= 1.02:
        return ""
    return "good" if ratio > 1 else "bad"


# Tables


def _tables(runs: Sequence[Results], labels: Sequence[str]) -> str:
    parts = [_comparison(runs, labels)] if len(runs) == 2 else []
    for run, label in zip(runs, labels, strict=True):
        name = "All loads" if len(runs) == 1 else f"All loads of {label}"
        parts.append(_section(name, _load_table(runs, run)))
    return "\n".join(part for part in parts if part)


def _section(title: str, body: str, note: str = "") -> str:
    extra = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f"<section><h2>{html.escape(title)}</h2>{body}{extra}</section>" if body else ""


def _table(header: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """`rows`: class of the row, and its cells as HTML."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in header)
    body = "".join(
        f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        for kind, cells in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _dot(runs: Sequence[Results], server: str, text: str) -> str:
    return f'<span class="dot" style="--c: {_color(runs, server)}"></span>{html.escape(text)}'


def _load_table(runs: Sequence[Results], run: Results) -> str:
    header = ["server", "load", "speed-up", "tokens/s", "TTFT ms", "TPOT ms", "p99 TPOT", "E2E ms",
              "length", "nodes"]  # fmt: skip
    goodput = bool(run["plan"]["goodput"])
    header += ["good req/s"] if goodput else []
    rows = []
    names = [entry["name"] for entry in run["servers"]]
    points = sorted(
        run["points"],
        key=lambda p: (p["prompts"] != MIX, p["prompts"], p["order"], names.index(p["server"])),
    )
    for place, entry in enumerate(points):
        spec = entry["spec"] or {}
        nodes = spec.get("nodes_per_request_step")
        nodes = spec.get("nodes_per_draft") if nodes is None else nodes
        ratio = entry["speed_up"][SPEED_UP]
        idle = entry["level"] == IDLE.key and entry["x"] is not None
        load = "idle" if idle else entry["label"]
        if entry["prompts"] != MIX:
            load = f"{entry['prompts']}, {entry['label']}"
        cells = [
            _dot(runs, entry["server"], entry["server"]),
            html.escape(load),
            f'<span class="{_better(ratio)}">{format_number(ratio, 2, "×")}</span>',
            format_number(entry["output_throughput"], 1),
            format_number(entry["p50_ttft_ms"], 0),
            format_number(entry["p50_tpot_ms"], 1),
            format_number(entry["p99_tpot_ms"], 1),
            format_number(entry["p50_e2el_ms"], 0),
            format_number(spec.get("mean_acceptance_length"), 2),
            format_number(nodes, 1),
        ]
        cells += [format_number(entry["request_goodput"], 2)] if goodput else []
        following = points[place + 1] if place + 1 < len(points) else entry
        last = (following["prompts"], following["level"]) != (entry["prompts"], entry["level"])
        rows.append(("rule" if last else "", cells))
    return _table(header, rows) if rows else ""


def same_load(a: Mapping[str, Any], points: Iterable[Mapping[str, Any]]) -> Any:
    """The point of `points` with the server, prompts and load of `a`; None when there is none.

    Rates that each run found for itself match when they are within 10 % of each other.
    """
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


def _comparison(runs: Sequence[Results], labels: Sequence[str]) -> str:
    a, b = labels
    header = ("server", "load", f"tokens/s {a}", b, "B / A", f"TPOT ms {a}", b, "A / B",
              f"E2E ms {a}", b, "A / B")  # fmt: skip
    rows = []
    for first in runs[0]["points"]:
        second = same_load(first, runs[1]["points"])
        if second is None:
            continue
        cells = [_dot(runs, first["server"], first["server"]), html.escape(
            first["label"] if first["prompts"] == MIX else f"{first['prompts']}, {first['label']}"
        )]  # fmt: skip
        for key, digits, more_is_better in (
            ("output_throughput", 1, True), ("p50_tpot_ms", 1, False), ("p50_e2el_ms", 0, False),
        ):  # fmt: skip
            x, y = first[key], second[key]
            ratio = None if not x or not y else (y / x if more_is_better else x / y)
            shown = f'<span class="{_better(ratio)}">{format_number(ratio, 2, "×")}</span>'
            cells += [format_number(x, digits), format_number(y, digits), shown]
        rows.append(("", cells))
    note = (
        f"A is {a}, B is {b}; a ratio above 1 means that B is better. Loads that only one of them "
        "has are left out."
    )
    if not rows:
        return _section(f"{a} against {b}", '<p class="note">They have no load in common.</p>')
    return _section(f"{a} against {b}", _table(header, rows), note)


# What made the numbers


def _provenance(run: Results, label: str) -> str:
    record = run["provenance"]
    machine, versions = record["hardware"], record["versions"]
    extensions = f" ({', '.join(machine['extensions'])})" if machine["extensions"] else ""
    plan = run["plan"]
    order = "taking turns, all up" if plan["together"] else "one after another"
    facts = {
        "command": f"<code>{html.escape(record['command'])}</code>",
        "commit": html.escape(str(record["commit"])),
        "versions": html.escape(", ".join(f"{k} {v}" for k, v in versions.items() if v)),
        "hardware": html.escape(
            "; ".join(
                [
                    f"{machine['cpu']}, {machine['logical_cpus']} logical CPUs{extensions}, "
                    f"{machine['memory_gib']} GiB",
                    *machine.get("gpus", ()),
                ]
            )
        ),
        "load": html.escape(
            f"vllm bench serve, Poisson arrivals for {plan['point_time']:g} s a rate, "
            f"{plan['repeats']} repeat(s), servers {order}; at most {plan['max_num_seqs']} "
            "requests in a batch"
        ),
    }
    items = "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in facts.items())
    commands = "".join(
        f"<p><b>{html.escape(entry['name'])}</b></p>"
        + (
            f"<pre>{html.escape(entry['command'])}\n\n{html.escape(entry['load_command'])}</pre>"
            if entry["command"]
            else f"<pre>{html.escape(entry['failure'] or 'not measured')}</pre>"
        )
        for entry in run["servers"]
    )
    failures = "".join(
        f"<p><b>{html.escape(entry['name'])}</b> did not finish</p>"
        f"<pre>{html.escape(entry['failure'])}</pre>"
        for entry in run["servers"]
        if entry["failure"] and entry["command"]
    )
    return (
        f"<section><h2>What made {html.escape(label)}</h2>"
        f'<dl class="facts">{items}</dl>{failures}'
        f"<details><summary>Commands of every server and its load</summary>{commands}</details>"
        '<p class="note">Speed-up: ratio to plain vLLM under the same load in the same run. '
        "Latencies are medians where nothing else is said. Length: mean tokens per request and "
        "step, 1 + accepted / drafts. Nodes: drafted per request and step.</p></section>"
    )
