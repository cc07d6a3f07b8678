# SPDX-License-Identifier: Apache-2.0
"""Does the adaptive tree budget meet its targets at every concurrency?

Plain vLLM, one engine for each fixed budget and one with `tree_budget` "auto" serve the same
prompts side by side (interleave.py).

    python bench/check_budget_targets.py --data PROMPTS [--minutes 6] [--rounds 3]
"""

from __future__ import annotations

from statistics import median
from typing import Any

from harness import BASELINE, HEADS, Benchmark, Cells, by_load, ratios, total
from interleave import Load

from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.bench.summary import format_number

CONCURRENCIES = (1, 2, 4, 8, 16)
JETSPEC = {
    "method": "jetspec",
    "model": str(HEADS / "smollm2-135m-jetspec"),
    "num_speculative_tokens": 32,
}
FIXED = {
    f"fixed-{nodes}": {**JETSPEC, "num_speculative_tokens": nodes, "tree_budget": nodes}
    for nodes in (4, 8, 16, 32)
}
SYSTEMS = {BASELINE: None, **FIXED, "auto": JETSPEC}
PROMPTS, LONGEST_PROMPT = 400, 700


def make_loads(args: Any, target: str) -> list[Load]:
    from vllm_specplug.bench.prompts import chat_token_ids

    prompts = chat_token_ids(target, args.data, PROMPTS, LONGEST_PROMPT)
    loads = []
    for number in range(args.rounds):
        for concurrency in args.concurrency:
            first, count = 37 * number + 2 * concurrency, max(4, 2 * concurrency)
            chosen = prompts[first : first + count]
            loads.append(Load(f"{concurrency} at once", number, chosen, concurrency))
    return loads


def summarise(cells: Cells) -> list[dict[str, Any]]:
    """Per load: each system's medians, and how auto compares, round by round."""
    rows = []
    for found in by_load(cells).values():
        auto = found["auto"]
        rate = {name: median(c["tokens_per_s"] for c in group) for name, group in found.items()}
        best = max((name for name in FIXED if name in rate), key=lambda name: rate[name])

        def over(other: str, field: str, found: dict[str, Cells] = found) -> float:
            return median(ratios(found["auto"], found[other], lambda cell: cell[field]))

        rows.append(
            {
                "concurrency": auto[0]["concurrency"],
                "rounds": len(auto),
                "tokens_per_s": rate,
                "auto_nodes": median(c["nodes"] / max(c["drafts"], 1.0) for c in auto),
                "expected_over_accepted": total(auto, "expected")
                / max(total(auto, "accepted"), 1.0),
                "over_plain": over(BASELINE, "tokens_per_s"),
                "plain_tpot_over_auto": 1 / over(BASELINE, "tpot_ms"),
                "best_fixed": best,
                "over_best_fixed": over(best, "tokens_per_s"),
            }
        )
    return sorted(rows, key=lambda row: row["concurrency"])


def targets(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """What the adaptive budget must reach, and whether the rows do."""
    return {
        "throughput at least 0.97 x plain everywhere": all(r["over_plain"] >= 0.97 for r in rows),
        "TPOT at least as good as 0.97 x plain everywhere": all(
            r["plain_tpot_over_auto"] >= 0.97 for r in rows
        ),
        "within 5 % of the best fixed budget at the lowest load": rows[0]["over_best_fixed"]
        >= 0.95,
        "nowhere more than 10 % behind the best fixed budget": all(
            r["over_best_fixed"] >= 0.90 for r in rows
        ),
    }


def page(cells: Cells) -> ResultPage:
    rows = summarise(cells)
    checked = targets(rows)
    header = ("requests at once", "rounds", *SYSTEMS, "auto nodes", "expected / accepted",
              "auto / plain", "plain / auto TPOT", "best fixed", "auto / best fixed")  # fmt: skip
    table = [
        [
            str(r["concurrency"]),
            str(r["rounds"]),
            *(format_number(r["tokens_per_s"].get(name), 1) for name in SYSTEMS),
            *(f"{r[key]:.2f}" for key in ("auto_nodes", "expected_over_accepted", "over_plain",
                                          "plain_tpot_over_auto")),
            r["best_fixed"],
            f"{r['over_best_fixed']:.2f}",
        ]
        for r in rows
    ]  # fmt: skip
    return ResultPage(
        name="budget",
        title="The adaptive budget beside plain decoding and fixed budgets",
        about="Output tokens per CPU second of one thread; SmolLM2-135M-Instruct in bfloat16, its "
        "JetSpec head with n-gram branches, greedy, prompts of all data files in turn, all systems "
        "side by side, in turns of a second. Ratios are medians of the rounds' ratios; the TPOT "
        "column is above 1 where auto is faster. Nodes are per draft; expected are the accepted "
        "nodes that auto's acceptance model foresaw.",
        sections=[
            Section(
                header,
                table,
                notes=["\n".join(f"- {'holds' if held else '**missed**'}: {target}"
                                 for target, held in checked.items())],
            )
        ],
        data={"rows": rows, "targets": checked},
        made_by=[cell["provenance"] for cell in cells],
        figure=plot(rows),
    )  # fmt: skip


def plot(rows: list[dict[str, Any]]) -> Any:
    from vllm_specplug.bench.figures import add_legend, new_figure, place_measured, system_colors

    figure, (axis,) = new_figure(width=7, height=4.2)
    colors = system_colors(SYSTEMS)
    places = [row["concurrency"] for row in rows]
    for name in (*FIXED, "auto"):
        rates = [row["tokens_per_s"] for row in rows]
        values = [rate.get(name, float("nan")) / rate[BASELINE] for rate in rates]
        width = 3.0 if name == "auto" else 1.4
        axis.plot(places, values, "o-", color=colors[name], label=name, linewidth=width)
    axis.axhline(1.0, color=colors[BASELINE], linestyle="--", label=BASELINE)
    place_measured(axis, places)
    axis.set(xlabel="requests at once", ylabel="tokens/s over plain vLLM")
    add_legend(figure, axis)
    return figure


def main() -> None:
    benchmark = Benchmark("budget", __doc__)
    benchmark.add_comparison_flags(minutes=6.0, rounds=3, tokens=64)
    benchmark.parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES)
    args = benchmark.parse()
    if not args.report_only:
        benchmark.compare(
            args, SYSTEMS, lambda target: make_loads(args, target),
            engine={"max_num_seqs": 16, "max_num_batched_tokens": 2048},
            sampling={"max_tokens": args.tokens},
        )  # fmt: skip
    benchmark.publish(args, page(benchmark.cells(args)))


if __name__ == "__main__":
    main()
