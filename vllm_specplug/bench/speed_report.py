# SPDX-License-Identifier: Apache-2.0
"""Benchmark cells summed up: JSON, markdown and a bar plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_specplug.bench.provenance import one_line
from vllm_specplug.bench.report import markdown_table


def summarize(
    speed_cells: Iterable[dict[str, Any]], length_cells: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    """Medians over rounds.

    A speed-up is the median of the rounds' ratios to plain vLLM in the same round at the same
    batch, so that a slow minute of the machine cancels out.

    Returns:
        "speed": list of {batch, method, tokens_per_s, speed_up, mean_acceptance_length,
        median_ttft_ms, median_tpot_ms, rounds}; "length": list of {method, prompts,
        mean_acceptance_length, drafts, nodes_per_draft}.
    """
    runs: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
    for cell in speed_cells:
        _, round_, batch, method = cell["key"]
        runs.setdefault((int(batch), method), {})[round_] = cell
    speed = []
    for (batch, method), rounds in runs.items():
        plain = runs.get((batch, "plain"), {})
        ratios = [
            cell["tokens_per_s"] / plain[round_]["tokens_per_s"]
            for round_, cell in rounds.items()
            if round_ in plain
        ]
        speed.append(
            {
                "batch": batch,
                "method": method,
                "tokens_per_s": _median(rounds.values(), "tokens_per_s"),
                "speed_up": statistics.median(ratios) if ratios else None,
                "speed_up_range": [min(ratios), max(ratios)] if ratios else None,
                "mean_acceptance_length": _acceptance_length(rounds.values()),
                "median_ttft_ms": _median(rounds.values(), "median_ttft_ms"),
                "median_tpot_ms": _median(rounds.values(), "median_tpot_ms"),
                "rounds": len(rounds),
            }
        )
    length = [
        {
            "method": cell["key"][1],
            "prompts": cell["key"][2],
            "mean_acceptance_length": _acceptance_length([cell]),
            "drafts": cell["drafts"],
            "nodes_per_draft": cell["draft_tokens"] / cell["drafts"] if cell["drafts"] else None,
        }
        for cell in length_cells
    ]
    return {"speed": speed, "length": length}


def _median(cells: Iterable[dict[str, Any]], key: str) -> float:
    return statistics.median(cell[key] for cell in cells)


def _acceptance_length(cells: Iterable[dict[str, Any]]) -> float | None:
    counted = [cell for cell in cells if cell["drafts"]]
    drafts = sum(cell["drafts"] for cell in counted)
    return 1.0 + sum(cell["accepted_tokens"] for cell in counted) / drafts if drafts else None


def to_markdown(summary: dict[str, Any], record: dict[str, Any]) -> str:
    """Both tables with what made them."""
    parts = []
    if summary["speed"]:
        header = ("batch", "method", "tokens/s", "speed-up", "range", "accepted length")
        header += ("TTFT ms", "TPOT ms")
        rows = [
            (
                str(row["batch"]),
                row["method"],
                f"{row['tokens_per_s']:.1f}",
                _format(row["speed_up"], "{:.2f} x"),
                "-"
                if row["speed_up_range"] is None
                else "{:.2f}-{:.2f}".format(*row["speed_up_range"]),
                _format(row["mean_acceptance_length"], "{:.2f}"),
                f"{row['median_ttft_ms']:.0f}",
                f"{row['median_tpot_ms']:.1f}",
            )
            for row in summary["speed"]
        ]
        parts.append("## Speed\n\n" + markdown_table(header, rows))
        parts.append(
            "Medians over rounds; speed-up is the median of the rounds' ratios to plain vLLM. "
            "Accepted length is 1 + accepted / drafts."
        )
    if summary["length"]:
        sets = list(dict.fromkeys(row["prompts"] for row in summary["length"]))
        methods = list(dict.fromkeys(row["method"] for row in summary["length"]))
        found = {
            (row["method"], row["prompts"]): row["mean_acceptance_length"]
            for row in summary["length"]
        }
        rows = [
            (method, *(_format(found.get((method, name)), "{:.2f}") for name in sets))
            for method in methods
        ]
        parts.append("## Mean acceptance length\n\n" + markdown_table(("tree", *sets), rows))
    parts.append(one_line(record))
    return "\n\n".join(parts) + "\n"


def _format(value: float | None, template: str) -> str:
    return "-" if value is None else template.format(value)


def _range(values: list[float] | None) -> str:
    return "-" if values is None else f"{values[0]:.2f}-{values[1]:.2f}"


def write_report(summary: dict[str, Any], record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes speed.json, speed.md and speed.png to `folder`; returns their paths.

    The plot is left out when matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "speed.json", folder / "speed.md"]
    written[0].write_text(json.dumps({**record, **summary}, indent=2) + "\n")
    written[1].write_text(to_markdown(summary, record))
    if summary["speed"] and _plot(summary["speed"], folder / "speed.png"):
        written.append(folder / "speed.png")
    return written


def _plot(rows: list[dict[str, Any]], path: Path) -> bool:
    """Bars of the speed-ups by batch."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = sorted({row["batch"] for row in rows})
    methods = [m for m in dict.fromkeys(row["method"] for row in rows) if m != "plain"]
    width = 0.8 / max(len(methods), 1)
    figure, axes = plt.subplots(figsize=(7, 3.5), constrained_layout=True)
    for index, method in enumerate(methods):
        by_batch = {row["batch"]: row["speed_up"] or 0.0 for row in rows if row["method"] == method}
        positions = [i + (index - (len(methods) - 1) / 2) * width for i in range(len(batches))]
        bars = axes.bar(positions, [by_batch.get(b, 0.0) for b in batches], width, label=method)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_ylabel("tokens/s against plain vLLM")
    axes.legend(frameon=False, ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
