# SPDX-License-Identifier: Apache-2.0
"""Load that swings across the point where drafts stop paying, for minutes.

Phases of one and of sixteen requests at once follow each other, served by plain vLLM and by an
engine with `tree_budget` "auto" side by side. The budget must follow both ways, every time: a phase
whose throughput falls below `--least` x plain after the first cycle is a collapse, and the exit
status is 1.

    python bench/budget_oscillation.py --data PROMPTS [--rounds 15] [--least 0.9]
"""

from __future__ import annotations

import sys
from typing import Any

from harness import BASELINE, HEADS, Benchmark, Cells, by_load
from interleave import Load

from vllm_specplug.bench.result_page import ResultPage, Section

CONCURRENCIES = {1: 3, 16: 24}
"""Prompts of a phase by its requests at once."""
PROMPT_SETS = 3
NODES = 32
SYSTEMS = {
    BASELINE: None,
    "auto": {
        "method": "jetspec",
        "model": str(HEADS / "smollm2-135m-jetspec"),
        "num_speculative_tokens": NODES,
    },
}


def make_loads(args: Any, target: str) -> list[Load]:
    from vllm_specplug.bench.prompts import chat_token_ids

    prompts = chat_token_ids(target, args.data, 400, 700)
    return [
        Load(f"{concurrency} at once", cycle, prompts[first : first + count], concurrency)
        for cycle in range(args.rounds)
        for first in (29 * (cycle % PROMPT_SETS),)
        for concurrency, count in CONCURRENCIES.items()
    ]


def page(cells: Cells, least: float) -> ResultPage:
    found = by_load(cells)
    rows: list[list[str]] = []
    settled: list[float] = []
    for cycle in range(min(len(group["auto"]) for group in found.values())):
        rows.append([str(cycle + 1)])
        for group in found.values():
            auto, plain = group["auto"][cycle], group[BASELINE][cycle]
            ratio = auto["tokens_per_s"] / plain["tokens_per_s"]
            rows[-1] += [f"{ratio:.2f}", f"{auto['nodes'] / max(auto['drafts'], 1.0):.1f}"]
            settled += [ratio] if cycle else []
    holds = bool(settled) and min(settled) >= least
    seconds = sum(cell["seconds"] for cell in cells if cell["system"] == "auto")
    header = ["cycle"]
    for load in found:
        header += [f"{load}, over plain", "nodes"]
    verdict = "holds" if holds else "**missed**"
    return ResultPage(
        name="budget_oscillation",
        title="The adaptive budget under a load that swings",
        about=f"Phases of one and of sixteen requests at once follow each other, {seconds:.0f} CPU "
        "seconds of one thread of the drafting engine; SmolLM2-135M-Instruct in bfloat16, its "
        f"JetSpec head, up to {NODES} nodes per tree, greedy, 3 prompts in a quiet phase and 24 in "
        "a busy one. Tokens per second over those of plain vLLM for the same prompts, nodes per "
        "draft.",
        sections=[
            Section(header, rows,
                    notes=[f"- {verdict}: after the first cycle no phase below {least:g} x plain"])
        ],
        data={"cells": cells, "holds": holds},
        made_by=[cell["provenance"] for cell in cells],
    )  # fmt: skip


def main() -> int:
    benchmark = Benchmark("budget_oscillation", __doc__)
    benchmark.add_comparison_flags(minutes=30.0, rounds=15, tokens=64)
    benchmark.parser.add_argument("--least", type=float, default=0.9, help="lowest ratio to plain")
    args = benchmark.parse()
    if not args.report_only:
        benchmark.compare(
            args, SYSTEMS, lambda target: make_loads(args, target),
            engine={"max_num_seqs": 16, "max_num_batched_tokens": 2048},
            sampling={"max_tokens": args.tokens},
        )  # fmt: skip
    result = page(benchmark.cells(args), args.least)
    benchmark.publish(args, result)
    return int(not result.data["holds"])


if __name__ == "__main__":
    sys.exit(main())
