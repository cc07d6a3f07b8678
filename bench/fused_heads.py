# SPDX-License-Identifier: Apache-2.0
"""Block heads with and without a local head against plain vLLM, side by side.

Plain, JetSpec, DDTree and DeLS, chains and trees of equal budget, without n-gram branches.

    python bench/fused_heads.py --data PROMPTS [--nodes 16] [--prompts 12]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness import BASELINE, HEADS, Benchmark, Cells, by_load
from speeds import ABOUT, add_load_flags, make_loads, speed_tables

from vllm_specplug.bench.result_page import ResultPage

MARKOV = {
    "local_head": str(HEADS / "smollm2-135m-dels-markov"),
    # The best of the grid that acceptance.py searches.
    "alpha": 0.6,
    "beta": 0.5,
}
HEAD_SETTINGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("JetSpec", "jetspec", {}),
    ("DFlash", "ddtree", {}),
    ("DeLS GRU", "dels", {}),
    ("DeLS Markov", "dels", MARKOV),
)


def make_systems(nodes: int) -> dict[str, dict[str, Any] | None]:
    from vllm_specplug.presets import speculative_config

    shared = {"num_speculative_tokens": nodes, "tree_budget": nodes, "ngram_topk": 0}
    systems: dict[str, dict[str, Any] | None] = {BASELINE: None}
    for name, method, extra in HEAD_SETTINGS:
        config = {**speculative_config("smollm2", method), **extra, **shared}
        systems[f"{name} chain"] = {**config, "tree_width": 1}
        systems[f"{name} tree"] = config
    del systems["JetSpec chain"]
    return systems


def page(cells: Cells, nodes: int) -> ResultPage:
    sections, data = speed_tables(cells)
    draft_ms = {(row["load"], row["system"]): row["draft_ms"] for row in data}
    noted = []
    for load, section in zip(by_load(cells), sections, strict=True):
        notes = []
        for shape in ("chain", "tree"):
            alone, gru, markov = (
                draft_ms[load, f"{name} {shape}"] for name in ("DFlash", "DeLS GRU", "DeLS Markov")
            )
            notes.append(
                f"The local head adds {100 * (gru / alone - 1):.0f} % (GRU) and "
                f"{100 * (markov / alone - 1):.0f} % (Markov) to a {shape}'s draft."
            )
        noted.append(replace(section, notes=notes))
    return ResultPage(
        name="fused_heads",
        title="Block heads with and without a local head",
        about=f"{ABOUT} {nodes} nodes per tree, no n-gram branches.",
        sections=noted,
        data=data,
        made_by=[cell["provenance"] for cell in cells],
    )


def main() -> None:
    benchmark = Benchmark("fused_heads", __doc__)
    benchmark.add_comparison_flags(minutes=6.0, rounds=2, tokens=64)
    add = benchmark.parser.add_argument
    add("--nodes", type=int, default=16)
    add_load_flags(benchmark.parser)
    args = benchmark.parse()
    if not args.report_only:
        benchmark.compare(
            args, make_systems(args.nodes), lambda target: make_loads(args, target),
            engine={"max_num_seqs": 8}, sampling={"max_tokens": args.tokens},
        )  # fmt: skip
    benchmark.publish(args, page(benchmark.cells(args), args.nodes))


if __name__ == "__main__":
    main()
