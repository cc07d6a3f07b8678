# SPDX-License-Identifier: Apache-2.0
"""Serves the heads that `equal_training.py` left in a folder, beside plain decoding.

    python bench/equal_serving.py --runs RUNS --data PROMPTS [--nodes 16]

Trees of a fixed size, so that what differs is the heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import BASELINE, Benchmark
from speeds import ABOUT, add_load_flags, make_loads, speed_tables

from vllm_specplug.bench.result_page import ResultPage

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


def main() -> None:
    benchmark = Benchmark("equal_serving", __doc__)
    benchmark.add_comparison_flags(minutes=10.0, rounds=2, tokens=96)
    add = benchmark.parser.add_argument
    add("--runs", type=Path, required=True, help="folder of the trained heads")
    add("--nodes", type=int, default=16, help="of each tree")
    add_load_flags(benchmark.parser)
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
        about=f"{ABOUT} Trees of {args.nodes} nodes; heads of equal_training.",
        sections=sections,
        data=data,
        made_by=[cell["provenance"] for cell in cells],
    )
    benchmark.publish(args, page)


if __name__ == "__main__":
    main()
