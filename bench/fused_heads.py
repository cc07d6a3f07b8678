# SPDX-License-Identifier: Apache-2.0
"""Block heads with and without a local head against plain vLLM, side by side.

Plain, JetSpec, DDTree and DeLS, chains and trees of equal budget, without n-gram branches.

    python bench/fused_heads.py --data PROMPTS [--nodes 16] [--prompts 12]
"""

from __future__ import annotations

from statistics import median
from typing import Any

from harness import BASELINE, HEADS, Benchmark, Cells, by_load, ratios, total
from interleave import Load

from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.bench.summary import format_number

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


def make_loads(args: Any, target: str) -> list[Load]:
    from vllm_specplug.bench.prompts import chat_token_ids

    prompts = chat_token_ids(target, args.data, 400, 1500)
    return [
        Load(f"{concurrency} at once", number, prompts[first : first + args.prompts], concurrency)
        for number in range(args.rounds)
        for first in (args.prompts * number,)
        for concurrency in args.concurrency
    ]


def page(cells: Cells, nodes: int) -> ResultPage:
    sections, data = [], []
    for load, found in by_load(cells).items():
        draft_ms = {}
        rows = []
        for name, group in found.items():
            drafts = total(group, "drafts")
            draft_ms[name] = median(c["draft_ms"] for c in group) if drafts else None
            values = {
                "load": load,
                "system": name,
                "tokens_per_s": median(c["tokens_per_s"] for c in group),
                "over_plain": median(ratios(group, found[BASELINE], lambda c: c["tokens_per_s"])),
                "mean_acceptance_length": 1 + total(group, "accepted") / drafts if drafts else None,
                "draft_ms": draft_ms[name],
            }
            data.append(values)
            rows.append(
                [
                    name,
                    f"{values['tokens_per_s']:.1f}",
                    f"{values['over_plain']:.2f} x",
                    format_number(values["mean_acceptance_length"], 2),
                    format_number(values["draft_ms"], 2),
                ]
            )
        notes = []
        for shape in ("chain", "tree"):
            alone, gru, markov = (
                draft_ms[f"{name} {shape}"] for name in ("DFlash", "DeLS GRU", "DeLS Markov")
            )
            notes.append(
                f"The local head adds {100 * (gru / alone - 1):.0f} % (GRU) and "
                f"{100 * (markov / alone - 1):.0f} % (Markov) to a {shape}'s draft."
            )
        header = ("", "tokens/s", "against plain", "mean acceptance length", "draft, ms (median)")
        rounds = len(found[BASELINE])
        sections.append(Section(header, rows, f"{load} ({rounds} rounds)", notes))
    return ResultPage(
        name="fused_heads",
        title="Block heads with and without a local head",
        about=f"SmolLM2-135M-Instruct in bfloat16, greedy, {nodes} nodes per tree, no n-gram "
        "branches. The engines answer the same prompts side by side in one process, in turns of a "
        "second; times are CPU seconds of one thread.",
        sections=sections,
        data=data,
        made_by=[cell["provenance"] for cell in cells],
    )


def main() -> None:
    benchmark = Benchmark("fused_heads", __doc__)
    benchmark.add_comparison_flags(minutes=6.0, rounds=2, tokens=64)
    add = benchmark.parser.add_argument
    add("--concurrency", type=int, nargs="+", default=(1, 4))
    add("--nodes", type=int, default=16)
    add("--prompts", type=int, default=12, help="per round")
    args = benchmark.parse()
    if not args.report_only:
        benchmark.compare(
            args, make_systems(args.nodes), lambda target: make_loads(args, target),
            engine={"max_num_seqs": 8}, sampling={"max_tokens": args.tokens},
        )  # fmt: skip
    benchmark.publish(args, page(benchmark.cells(args), args.nodes))


if __name__ == "__main__":
    main()
