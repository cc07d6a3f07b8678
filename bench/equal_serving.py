# SPDX-License-Identifier: Apache-2.0
"""Serves the trained heads of a folder, beside plain decoding.

    python bench/equal_serving.py --runs RUNS --data PROMPTS [--nodes 16]

RUNS/KIND/head is what `specplug train KIND` wrote, DeLS has RUNS/dels-backbone/head too. Trees have
a fixed size, so that only the heads differ.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from harness import BASELINE, Benchmark, Cells, by_load, latency_gains, ratios, total
from interleave import Load

from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.bench.summary import format_number

ABOUT = (
    "SmolLM2-135M-Instruct in bfloat16, greedy. The engines answer the same prompts side by side "
    "in one process, in turns of a second; times are CPU seconds of one thread. TPOT is a whole "
    "answer's, the prompts of other requests included."
)
METHODS = {
    "jetspec": "jetspec",
    "dflash": "ddtree",
    "dels": "dels",
    "dspark": "dspark_tree",
    "eagle3": "eagle3_tree",
    "longspec": "longspec",
}


def make_systems(runs: Path, nodes: int) -> dict[str, dict[str, Any] | None]:
    """Plain vLLM and the method of each head in `runs`."""
    shared = {"num_speculative_tokens": nodes, "tree_budget": nodes, "ngram_topk": 0}
    systems: dict[str, dict[str, Any] | None] = {BASELINE: None}
    for kind, method in METHODS.items():
        head = runs / kind / "head"
        if not head.is_dir():
            continue
        if kind == "dels":
            own = {"model": str(runs / "dels-backbone" / "head"), "local_head": str(head)}
        else:
            own = {"model": str(head)}
        systems[kind] = {"method": method, **shared, **own}
    return systems


def make_loads(args: Any, target: str) -> list[Load]:
    """In every round each concurrency serves the same prompts, of which no other round has any."""
    from vllm_specplug.bench.prompts import chat_token_ids

    prompts = chat_token_ids(target, args.data, 400, 1500)
    return [
        Load(f"{concurrency} at once", number, prompts[first : first + args.prompts], concurrency)
        for number in range(args.rounds)
        for first in (args.prompts * number,)
        for concurrency in args.concurrency
    ]


def speed_tables(cells: Cells) -> tuple[list[Section], list[dict[str, Any]]]:
    """A section for each load with a row for each system, and the same as data."""
    sections, data = [], []
    for load, found in by_load(cells).items():
        rows = []
        for system, group in found.items():
            drafts = total(group, "drafts")
            drafting = [c["draft_ms"] for c in group if c.get("draft_ms") is not None]
            over = ratios(group, found[BASELINE], lambda c: c["tokens_per_s"])
            values = {
                "load": load,
                "system": system,
                "tokens_per_s": median(c["tokens_per_s"] for c in group),
                "over_plain": median(over),
                "over_plain_range": [min(over), max(over)],
                **latency_gains(group, found[BASELINE]),
                "tokens_per_step": total(group, "decode_tokens") / total(group, "decode_steps"),
                "mean_acceptance_length": 1 + total(group, "accepted") / drafts if drafts else None,
                "draft_ms": median(drafting) if drafting else None,
                "answers_of_plain": total(group, "same_as_plain") / total(group, "prompts"),
            }
            data.append(values)
            rows.append(
                [
                    system,
                    f"{values['tokens_per_s']:.1f}",
                    f"{values['over_plain']:.2f} x ({min(over):.2f} to {max(over):.2f})",
                    format_number(values["tpot_gain"], 2),
                    format_number(values["tpot_p99_gain"], 2),
                    f"{values['tokens_per_step']:.2f}",
                    format_number(values["mean_acceptance_length"], 2),
                    format_number(values["draft_ms"], 1),
                    f"{values['answers_of_plain']:.0%}",
                ]
            )
        header = (
            "", "tokens/s", "against plain", "median TPOT better by", "p99 TPOT better by",
            "tokens per step", "mean acceptance length",
            "ms a draft", "same answers as plain",
        )  # fmt: skip
        rounds = len(found[BASELINE])
        sections.append(Section(header, rows, f"{load} ({rounds} rounds)", []))
    return sections, data


def main() -> None:
    benchmark = Benchmark("equal_serving", __doc__)
    benchmark.add_comparison_flags(minutes=10.0, rounds=2, tokens=96)
    add = benchmark.parser.add_argument
    add("--runs", type=Path, required=True, help="folder of the trained heads")
    add("--nodes", type=int, default=16, help="of each tree")
    add("--concurrency", type=int, nargs="+", default=(1, 4))
    add("--prompts", type=int, default=12, help="per round")
    args = benchmark.parse()
    if not args.report_only:
        systems = make_systems(args.runs.resolve(), args.nodes)
        if len(systems) == 1:
            benchmark.parser.error(f"--runs {args.runs} holds none of: {', '.join(METHODS)}")
        benchmark.compare(
            args, systems, lambda target: make_loads(args, target),
            engine={"max_num_seqs": 8}, sampling={"max_tokens": args.tokens},
        )  # fmt: skip
    cells = benchmark.cells(args)
    sections, data = speed_tables(cells)
    page = ResultPage(
        name=benchmark.name,
        title="Heads of equal size after equal training, served",
        about=f"{ABOUT} Trees of {args.nodes} nodes.",
        sections=sections,
        data=data,
        made_by=[cell["provenance"] for cell in cells],
    )
    benchmark.publish(args, page)


if __name__ == "__main__":
    main()
