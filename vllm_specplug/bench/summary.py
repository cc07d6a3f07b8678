# SPDX-License-Identifier: Apache-2.0
"""Summaries of cells: medians, speed-ups over the baseline, crossover; as JSON, CSV, Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_specplug.bench.cells import MIX, Cell
from vllm_specplug.bench.load import BURST, IDLE, LATENCIES, PERCENTILES
from vllm_specplug.bench.plan import BASELINE, BenchPlan
from vllm_specplug.bench.sweep import Sweep
from vllm_specplug.bench.tables import format_number, markdown_table
from vllm_specplug.provenance import one_line, tidy

FORMAT = 1
RESULTS_NAME = "results.json"

# Metric -> whether more is better. A speed-up above 1 is always better than the baseline.
RATIOS = {"p50_e2el_ms": False, "p50_tpot_ms": False, "p50_ttft_ms": False,
          "output_throughput": True}  # fmt: skip
SPEED_UP = "p50_e2el_ms"
"""Metric of the crossover: the median time from request to last token."""

_MEDIANS = (
    "request_throughput", "request_goodput", "output_throughput", "max_concurrent_requests",
    *(f"p{percent}_{name}_ms" for name in LATENCIES for percent in PERCENTILES),
)  # fmt: skip
_PHASES = ("draft", "verify", "compact")


def summarize(sweep: Sweep, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of a sweep as plain data.

    They have "provenance", "plan", "servers" (name, command, load_command, failure), "points" (one
    per server, prompts and load; see `point`), and "crossover" by server (see `crossover`).
    """
    plan = sweep.plan
    points: list[dict[str, Any]] = []
    servers: list[dict[str, Any]] = []
    for entry in plan.ordered_servers:
        runs: dict[tuple[str, str], list[tuple[Cell, dict[str, Any]]]] = {}
        for cell in sweep.cells(entry.name):
            row = sweep.result(cell)
            if row is not None:
                runs.setdefault((cell.prompts, cell.level.key), []).append((cell, row))
        for found in sorted(runs.values(), key=lambda rows: load_order(rows[0][0])):
            cell = found[0][0]
            baseline = [sweep.result(Cell(BASELINE, c.prompts, c.level, c.repeat))
                        for c, _ in found]  # fmt: skip
            points.append(point(cell, [row for _, row in found], baseline))
        rows = [row for found in runs.values() for _, row in found]
        servers.append(
            {
                "name": entry.name,
                "speculative_config": json.loads(tidy(json.dumps(entry.speculative_config))),
                "command": tidy(rows[0]["server"]) if rows else None,
                "load_command": tidy(rows[-1]["command"]) if rows else None,
                "commits": sorted({str(row["commit"]) for row in rows}),
                "failure": sweep.skipped.get(entry.name, sweep.failures.get(entry.name)),
            }
        )
    place_idle(points)
    return {
        "format": FORMAT,
        "provenance": {**provenance, "command": tidy(str(provenance["command"]))},
        "plan": plan_facts(plan, [s.name for s in sweep.sets]),
        "servers": servers,
        "points": points,
        "crossover": {
            entry.name: crossover(points, entry.name)
            for entry in plan.servers
            if entry.name != BASELINE
        },
    }


def load_order(cell: Cell) -> tuple[Any, ...]:
    """Returns a sort key: mixed traffic before data sets, light loads before heavy ones."""
    return (cell.prompts != MIX, cell.prompts, cell.level.order)


def plan_facts(plan: BenchPlan, sets: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of the traffic."""
    return {
        "model": Path(plan.model).name,
        "head": None if plan.head is None else Path(plan.head).name,
        "data": list(sets),
        "dtype": plan.dtype,
        "execution": plan.execution,
        "output_len": plan.output_len,
        "temperature": plan.temperature,
        "ignore_eos": plan.ignore_eos,
        "goodput": list(plan.goodput),
        "repeats": plan.repeats,
        "point_time": plan.point_time,
        "max_num_seqs": plan.max_num_seqs,
        "together": plan.together,
    }


def point(
    cell: Cell,
    rows: Sequence[dict[str, Any]],
    baseline: Sequence[dict[str, Any] | None],
) -> dict[str, Any]:
    """Returns the medians of a server under a load over repeats.

    A speed-up is the median of the repeats' ratios to the baseline in the same repeat. If servers
    take turns, slow minutes of the machine cancel out.
    """
    values = {key: _median(row.get(key) for row in rows) for key in _MEDIANS}
    ratios: dict[str, Any] = {}
    for key, more_is_better in RATIOS.items():
        found = [
            (row[key] / base[key] if more_is_better else base[key] / row[key])
            for row, base in zip(rows, baseline, strict=True)
            if base is not None and row.get(key) and base.get(key)
        ]
        ratios[key] = statistics.median(found) if found else None
        if key == SPEED_UP:
            ratios["range"] = [min(found), max(found)] if found else None
    return {
        "server": cell.server,
        "prompts": cell.prompts,
        "level": cell.level.key,
        "label": cell.level.label,
        "order": list(cell.level.order),
        "x": cell.level.rate,
        "concurrency": cell.level.concurrency,
        "repeats": len(rows),
        "requests": sum(int(row["completed"]) for row in rows),
        "load_average": max(row["load_average"] for row in rows),
        **values,
        "speed_up": ratios,
        "spec": spec_facts(rows),
    }


def spec_facts(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns statistics of drafts over all repeats; None without speculation.

    mean_acceptance_length: 1 + accepted / drafts. acceptance_by_depth: share of drafts accepted to
    depth 1, 2, ... or deeper. nodes_per_draft: size of a draft. nodes_per_request_step: the same
    with steps without a draft counted as 0, which only this plugin's methods report. share: share
    of the run's wall time by phase.
    """
    counted = [row["spec"] for row in rows if row.get("spec")]
    drafts = sum(spec["drafts"] for spec in counted)
    plain_steps: dict[str, float] = {}
    for spec in counted:
        for reason, count in spec["plain_steps"].items():
            plain_steps[reason] = plain_steps.get(reason, 0.0) + count
    if not counted:
        return None
    nodes = sum(spec["draft_tokens"] for spec in counted)
    accepted = sum(spec["accepted_tokens"] for spec in counted)
    depth = max(len(spec["accepted_by_depth"]) for spec in counted)
    by_depth = [
        sum(spec["accepted_by_depth"][i] for spec in counted if i < len(spec["accepted_by_depth"]))
        for i in range(depth)
    ]
    steps = sum(spec["draft_steps"] for spec in counted)
    has_trees = steps > 0 or bool(plain_steps)
    request_steps = drafts + sum(plain_steps.values())
    wall_ms = 1e3 * sum(row["duration"] for row in rows)
    phases = {
        phase: sum(spec["milliseconds"].get(phase, 0.0) for spec in counted) for phase in _PHASES
    }
    return {
        "drafts": drafts,
        "mean_acceptance_length": 1.0 + accepted / drafts if drafts else None,
        "acceptance_by_depth": [count / drafts for count in by_depth] if drafts else [],
        "nodes_per_draft": nodes / drafts if drafts else None,
        "nodes_per_request_step": nodes / request_steps if has_trees and request_steps else None,
        "nodes_per_step": sum(s["draft_step_nodes"] for s in counted) / steps if steps else None,
        "plain_steps": plain_steps,
        "share": {phase: value / wall_ms for phase, value in phases.items()} if has_trees else None,
    }


def nodes_of(point: Mapping[str, Any]) -> float | None:
    """Returns nodes per request and step; per draft for methods that do not count plain steps."""
    spec = point["spec"] or {}
    nodes = spec.get("nodes_per_request_step")
    return spec.get("nodes_per_draft") if nodes is None else nodes


def place_idle(points: Iterable[dict[str, Any]]) -> None:
    """Sets the rate of the load with one request at a time to the baseline's throughput."""
    points = list(points)
    idle = [p for p in points if p["prompts"] == MIX and p["level"] == IDLE.key]
    rate = next((p["request_throughput"] for p in idle if p["server"] == BASELINE), None)
    for entry in idle:
        entry["x"] = rate


def crossover(points: Sequence[Mapping[str, Any]], server: str) -> dict[str, Any]:
    """Returns where speculation becomes slower than plain decoding.

    Returns:
        "rate": requests/s at which the speed-up (median end-to-end latency) first falls below 1,
        interpolated over the rate's logarithm between two measured rates; None if it never does, or
        is below 1 at the first rate. "text": the same in words; "past" the last rate if only all
        requests at once are slower. "at_burst": the speed-up with all requests at once.
    """
    curve = sorted(
        (p["x"], p["speed_up"][SPEED_UP])
        for p in points
        if p["server"] == server
        and p["prompts"] == MIX
        and p["x"] is not None
        and p["speed_up"][SPEED_UP] is not None
    )
    burst: Mapping[str, Any] = next(
        (
            p["speed_up"]
            for p in points
            if p["server"] == server and p["prompts"] == MIX and p["level"] == BURST.key
        ),
        {},
    )
    at_burst = burst.get(SPEED_UP)
    answer: dict[str, Any] = {"rate": None, "at_burst": at_burst, "text": "not measured"}
    if not curve:
        return answer
    if curve[0][1] < 1.0:
        return answer | {"text": f"slower from {curve[0][0]:.3g}/s on"}
    for (x0, s0), (x1, s1) in zip(curve, curve[1:], strict=False):
        if s1 < 1.0:
            share = (s0 - 1.0) / (s0 - s1)
            rate = x0 * math.exp(share * math.log(x1 / x0))
            return answer | {"rate": rate, "text": f"{rate:.3g}/s"}
    last = f"{curve[-1][0]:.3g}/s"
    saturated = [x for x in (at_burst, burst.get("output_throughput")) if x is not None]
    is_slower = any(round(x, 2) < 1.0 for x in saturated)
    return answer | {"text": f"past {last}" if is_slower else f"none up to {last}"}


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


# Text


def csv_text(results: Mapping[str, Any]) -> str:
    """Returns one CSV row per point, with empty cells for missing numbers."""
    columns = [
        "server", "prompts", "level", "rate", "concurrency", "repeats", "requests", "load_average",
        *_MEDIANS, *(f"speed_up_{key}" for key in RATIOS), "drafts", "mean_acceptance_length",
        "nodes_per_draft", "nodes_per_request_step", "nodes_per_step",
        *(f"{phase}_share" for phase in _PHASES), "acceptance_by_depth",
    ]  # fmt: skip
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for entry in results["points"]:
        spec = entry["spec"] or {}
        row = {**entry, **spec, "rate": entry["x"]}
        row |= {f"speed_up_{key}": entry["speed_up"][key] for key in RATIOS}
        row |= {f"{phase}_share": (spec.get("share") or {}).get(phase) for phase in _PHASES}
        row["acceptance_by_depth"] = " ".join(
            f"{share:.4f}" for share in spec.get("acceptance_by_depth", ())
        )
        writer.writerow({key: _short(value) for key, value in row.items()})
    return stream.getvalue()


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def to_markdown(results: Mapping[str, Any]) -> str:
    """Returns the table of loads, the crossovers and the provenance."""
    header = ("load", "server", "tokens/s", "speed-up", "TTFT ms", "TPOT ms", "E2E ms", "length",
              "nodes")  # fmt: skip
    mixed = [p for p in results["points"] if p["prompts"] == MIX]
    parts = [f"# {results['plan']['model']}: speculation under load"]
    if mixed:
        mixed.sort(key=lambda p: p["order"])
        rows = []
        for entry in mixed:
            spec = entry["spec"] or {}
            rows.append((
                entry["label"], entry["server"], format_number(entry["output_throughput"], 1),
                format_number(entry["speed_up"][SPEED_UP], 2, " x"),
                *(format_number(entry[f"p50_{name}_ms"], digits)
                  for name, digits in (("ttft", 0), ("tpot", 1), ("e2el", 0))),
                format_number(spec.get("mean_acceptance_length"), 2),
                format_number(nodes_of(entry), 1),
            ))  # fmt: skip
        parts.append(markdown_table(header, rows))
        parts.append(
            "Medians. Speed-up: of the median end-to-end latency against plain vLLM under the same "
            "load. Length: mean tokens per request and step, 1 + accepted / drafts. Nodes: drafted "
            "per request and step."
        )
    sets = [p for p in results["points"] if p["prompts"] != MIX and p["spec"]]
    if sets:
        names = list(dict.fromkeys(p["prompts"] for p in sets))
        found = {(p["server"], p["prompts"]): p["spec"]["mean_acceptance_length"] for p in sets}
        rows = [
            (server, *(format_number(found.get((server, name)), 2) for name in names))
            for server in dict.fromkeys(p["server"] for p in sets)
        ]
        parts.append("Mean acceptance length by data set:\n\n"
                     + markdown_table(("server", *names), rows))  # fmt: skip
    crossings = [f"{name}: {found['text']}" for name, found in results["crossover"].items()]
    if crossings and any(p["x"] is not None for p in mixed):
        parts.append("Slower than plain vLLM from this rate on: " + "; ".join(crossings) + ".")
    parts += [f"{s['name']}: {s['failure']}" for s in results["servers"] if s["failure"]]
    parts.append(one_line(results["provenance"]))
    return "\n\n".join(parts) + "\n"


def write_results(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes results.json, results.csv and results.md; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / RESULTS_NAME, folder / "results.csv", folder / "results.md"]
    written[0].write_text(json.dumps(results, indent=1) + "\n")
    written[1].write_text(csv_text(results))
    written[2].write_text(to_markdown(results))
    return written
