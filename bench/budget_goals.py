# SPDX-License-Identifier: Apache-2.0
"""Does the adaptive tree budget keep its promises at every concurrency?

Six engines are up in one process: plain vLLM, one for each fixed budget, and one with `tree_budget`
"auto". For each concurrency all of them serve the same prompts side by side, in turns of a second
on CPU clocks of their own (turns.py).

Every cell (round, concurrency, choice) is written down at once, and a run that is started again
goes on where the last one stopped.

    python bench/budget_goals.py --data PROMPTS [--minutes 6] [--rounds 3] [--out bench/results]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from turns import (
    LONGEST_PROMPT,
    PROMPTS,
    Load,
    append_cells,
    make_engine,
    missing_loads,
    read_cells,
    run_load,
    serve_in_turns,
)

CONCURRENCIES = (1, 2, 4, 8, 16)
BUDGETS = (4, 8, 16, 32)
CHOICES = ("plain", *(f"fixed-{nodes}" for nodes in BUDGETS), "auto")
LEAST_PROMPTS = 4


@dataclass(frozen=True)
class Cell:
    """What one choice reached at one concurrency in one round."""

    round: int
    concurrency: int
    choice: str
    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    seconds: float
    drafts: float
    nodes: float
    accepted: float
    expected: float
    """Accepted nodes that the adaptive budget had expected."""
    commit: str | None


def measure(args: argparse.Namespace, cells_path: Path) -> None:
    """Runs the missing cells, for at most `args.minutes`."""
    from vllm import SamplingParams

    from vllm_specplug.bench.prompts import chat_token_ids
    from vllm_specplug.bench.provenance import commit
    from vllm_specplug.targets import prepare_target

    deadline = time.monotonic() + 60 * args.minutes
    todo = missing_loads(read_cells(cells_path, Cell), args.rounds, args.concurrency)
    if not todo:
        return
    target = str(prepare_target("smollm2"))
    prompts = chat_token_ids(target, args.data, PROMPTS, LONGEST_PROMPT)
    drafting = {"method": "jetspec", "model": args.head, "num_speculative_tokens": max(BUDGETS)}
    engines = {}
    for choice in CHOICES:
        kind, _, nodes = choice.partition("-")
        fixed = {"num_speculative_tokens": int(nodes), "tree_budget": int(nodes)} if nodes else {}
        engines[choice] = make_engine(target, None if kind == "plain" else {**drafting, **fixed})
    warm = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for choice, llm in engines.items():
        run_load(llm, prompts[-6:], 2, warm, f"warm-{choice}")
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    for number, (round_, concurrency) in enumerate(todo):
        if time.monotonic() > deadline:
            print(f"out of time, {len(todo) - number} loads are left")
            return
        count = max(LEAST_PROMPTS, 2 * concurrency)
        first = 37 * round_ + 2 * concurrency
        chosen = prompts[first : first + count]
        loads = {
            choice: Load(llm, chosen, concurrency, params, f"c{number}")
            for choice, llm in engines.items()
        }
        serve_in_turns(list(loads.values()))
        cells = [
            Cell(round_, concurrency, choice, commit=commit(), **load.result())
            for choice, load in loads.items()
        ]
        append_cells(cells_path, cells)
        for cell in cells:
            print(
                f"round {round_} concurrency {concurrency:2d} {cell.choice:9s} "
                f"{cell.tokens_per_s:6.1f} tokens/s, TPOT {cell.tpot_ms:5.1f} ms, "
                f"{cell.nodes / max(cell.drafts, 1):4.1f} nodes a draft",
                flush=True,
            )


def summarise(cells: list[Cell]) -> list[dict[str, Any]]:
    """Per concurrency: each choice's medians, and how auto compares, round by round."""
    by_key: dict[tuple[int, str], dict[int, Cell]] = defaultdict(dict)
    for cell in cells:
        by_key[cell.concurrency, cell.choice][cell.round] = cell
    rows = []
    for concurrency in sorted({c.concurrency for c in cells}):
        auto = by_key[concurrency, "auto"]
        row: dict[str, Any] = {"concurrency": concurrency, "rounds": len(auto)}
        for choice in CHOICES:
            found = by_key[concurrency, choice].values()
            if found:
                row[choice] = median(c.tokens_per_s for c in found)
                row[f"{choice} TPOT"] = median(c.tpot_ms for c in found)
        row["auto nodes"] = median([c.nodes / max(c.drafts, 1.0) for c in auto.values()] or [0.0])
        row["expected / accepted"] = sum(c.expected for c in auto.values()) / max(
            sum(c.accepted for c in auto.values()), 1.0
        )

        def ratios(choice: str, field: str) -> list[float]:
            other = by_key[concurrency, choice]  # noqa: B023 - called in this round of the loop
            return [
                getattr(auto[r], field) / getattr(other[r], field)  # noqa: B023
                for r in auto  # noqa: B023
                if r in other
            ]

        if ratios("plain", "tokens_per_s"):
            row["auto / plain"] = median(ratios("plain", "tokens_per_s"))
            row["plain / auto TPOT"] = 1 / median(ratios("plain", "tpot_ms"))
        fixed = [name for name in CHOICES if name.startswith("fixed") and name in row]
        if fixed and auto:
            best = max(fixed, key=lambda name: row[name])
            row["best fixed"] = best
            row["auto / best fixed"] = median(ratios(best, "tokens_per_s") or [float("nan")])
        rows.append(row)
    return rows


def goals(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The promises and whether the rows keep them."""
    complete = [r for r in rows if "auto / plain" in r and "auto / best fixed" in r]
    if not complete:
        return []
    return [
        ("throughput at least 0.97 x plain everywhere",
         all(r["auto / plain"] >= 0.97 for r in complete)),
        ("TPOT at least as good as 0.97 x plain everywhere",
         all(r["plain / auto TPOT"] >= 0.97 for r in complete)),
        ("within 5 % of the best fixed budget at low load (concurrency 1)",
         complete[0]["auto / best fixed"] >= 0.95),
        ("nowhere more than 10 % behind the best fixed budget",
         all(r["auto / best fixed"] >= 0.90 for r in complete)),
    ]  # fmt: skip


def write_report(cells: list[Cell], out: Path, command: str) -> None:
    """budget.md, budget.json and budget.png beside the cells."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from vllm_specplug.bench.provenance import one_line, provenance

    rows = summarise(cells)
    checked = goals(rows)
    record = {**provenance(), "command": command}
    titles = ("concurrency", "rounds", *CHOICES, "auto nodes", "expected / accepted",
              "auto / plain", "plain / auto TPOT", "best fixed", "auto / best fixed")  # fmt: skip
    lines = [
        "# The adaptive budget beside plain decoding and fixed budgets",
        "",
        "Output tokens per CPU second of one thread; SmolLM2-135M-Instruct in bfloat16, its "
        "JetSpec head with n-gram branches, greedy, prompts of all data files in turn, all choices "
        "side by side, in turns of a second. Ratios are medians of the rounds' ratios; the TPOT "
        "column is above 1 where auto is faster. Nodes are per draft; expected are the accepted "
        "nodes that auto's acceptance model foresaw.",
        "",
        "| " + " | ".join(titles) + " |",
        "|" + " --- |" * len(titles),
    ]
    for row in rows:
        texts = []
        for title in titles:
            value = row.get(title, "-")
            digits = 1 if title in (*CHOICES, "auto nodes") else 2
            texts.append(f"{value:.{digits}f}" if isinstance(value, float) else str(value))
        lines.append("| " + " | ".join(texts) + " |")
    lines += ["", *(f"- {'holds' if ok else '**missed**'}: {text}" for text, ok in checked), ""]
    lines += [one_line(record)]
    (out / "budget.md").write_text("\n".join(lines) + "\n")
    (out / "budget.json").write_text(
        json.dumps(
            {"rows": rows, "goals": checked, "command": command, "provenance": record},
            indent=1, default=str,
        )
    )  # fmt: skip
    figure, axes = plt.subplots(figsize=(7, 4.2))
    places = [row["concurrency"] for row in rows if row.get("plain")]
    for choice in CHOICES[1:]:
        ratios = [row.get(choice, float("nan")) / row["plain"] for row in rows if row.get("plain")]
        strong = choice == "auto"
        axes.plot(
            places, ratios, marker="o", label=choice, linewidth=2.8 if strong else 1.2,
            color="black" if strong else None, zorder=3 if strong else 2,
        )  # fmt: skip
    axes.axhline(1.0, color="grey", linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens/s over plain vLLM")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out / "budget.png", dpi=150)
    print("\n".join(lines))


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=6.0, help="stop after this long")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--data", type=Path, required=True, help="folder of prompt files")
    parser.add_argument("--head", default=str(root / "heads" / "smollm2-135m-jetspec"))
    parser.add_argument("--out", type=Path, default=root / "bench" / "results")
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cells_path = args.out / ("budget_cells.jsonl")
    if not args.report_only:
        measure(args, cells_path)
    cells = read_cells(cells_path, Cell)
    if cells:
        command = "python bench/budget_goals.py --data PROMPTS"
        command += f" --rounds {args.rounds} --tokens {args.tokens}"
        write_report(cells, args.out, command)


if __name__ == "__main__":
    main()
