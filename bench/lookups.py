# SPDX-License-Identifier: Apache-2.0
"""N-gram trees, alone and on top of a head, beside plain decoding and vLLM's ngram.

All systems serve the same prompts side by side (interleave.py). Only steps count in which all
concurrent requests are decoded and none is prefilled. Requests are greedy, or sampled at
`--temperature`.

    python bench/lookups.py --data PROMPTS [--minutes 8] [--rounds 3] [--systems head --out FOLDER]
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from statistics import median
from typing import Any

from harness import (
    BASELINE,
    HEADS,
    Benchmark,
    Cells,
    by_load,
    decode_rate,
    latency_gains,
    ratios,
    total,
)
from interleave import Load

from vllm_specplug.bench.demo import NGRAM_CONFIG
from vllm_specplug.bench.evaluate import data_files
from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.bench.tables import format_number
from vllm_specplug.rows import LeftOut, RowFile

JETSPEC = {
    "method": "jetspec",
    "model": str(HEADS / "smollm2-135m-jetspec"),
    "num_speculative_tokens": 32,
}
LOCAL = {**JETSPEC, "method": "dels"}
SYSTEMS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    # The fastest dtype of vLLM on a CPU without bfloat16 products.
    "plain float32": None,
    # The difference between equal engines, whose memory lies elsewhere.
    "plain again": None,
    # What the plugin's products bring without drafts.
    "no drafts": {"method": "ngram_tree", "tree_budget": 0},
    "ngram": NGRAM_CONFIG,
    "ngram_tree": {"method": "ngram_tree"},
    "head": {**JETSPEC, "ngram_topk": 0},
    "head + n-grams": JETSPEC,
    "head + GRU + n-grams": {**LOCAL, "local_head": str(HEADS / "smollm2-135m-dels-gru")},
    "head + Markov + n-grams": {**LOCAL, "local_head": str(HEADS / "smollm2-135m-dels-markov")},
}
# Arguments of some engines.
ENGINES = {"plain float32": {"dtype": "float32"}}

PACE = (
    " In a closed loop a faster system takes in more prompts during each of its answers, which "
    "TPOT counts; pace is an answer's time per token over only the steps of the first ratio."
)
TIES = " They differ from plain decoding's where bfloat16 logits tie within rounding."
AGAIN = (
    " `plain again` is a second engine like the first: what differs there is no difference of "
    "systems."
)


def chat_token_ids(target: str, data: Path, count: int, longest: int) -> list[list[int]]:
    """Returns token ids of `count` prompts of all files of `data` in turn, in the target's chat
    template. Prompts of more than `longest` tokens are skipped."""
    from transformers import AutoTokenizer

    sets, left_out = [], LeftOut()
    for path in data_files([data]):
        rows = RowFile(path).conversations(left_out)
        sets.append([row.asked() for row in rows if row.messages])
        random.Random(0).shuffle(sets[-1])
    for line in left_out.lines():
        print(f"left out: {line}")
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    # A set that runs out begins again.
    turns = zip(*map(itertools.cycle, sets), strict=True)
    prompts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in itertools.islice(itertools.chain.from_iterable(turns), count)
    ]
    return [ids for ids in prompts if len(ids) <= longest]


def make_loads(args: Any, target: str) -> list[Load]:
    prompts = chat_token_ids(target, args.data, 400, 500)
    loads = []
    for number in range(args.rounds):
        for place, concurrency in enumerate(args.concurrency):
            first = 37 * (number * len(args.concurrency) + place)
            # The last prompts are not measured, because fewer requests run beside them.
            numbers = range(first, first + args.prompts + 4 * concurrency)
            chosen = [prompts[i % len(prompts)] for i in numbers]
            loads.append(Load(f"{concurrency} at once", number, chosen, concurrency))
    return loads


def summarise(cells: Cells) -> list[dict[str, Any]]:
    """Returns a row per load and system."""
    rows = []
    for load, found in by_load(cells).items():
        for name in (system for system in SYSTEMS if system in found):
            group = found[name]
            over = ratios(group, found[BASELINE], decode_rate)
            over_ngram = ratios(group, found.get("ngram", []), decode_rate)
            rows.append(
                {
                    "load": load,
                    "system": name,
                    "rounds": len(group),
                    "tokens_per_s": median(decode_rate(cell) for cell in group),
                    "over_plain": median(over),
                    "over_plain_range": [min(over), max(over)],
                    "over_ngram": median(over_ngram) if over_ngram else None,
                    **latency_gains(group, found[BASELINE]),
                    "tokens_per_step": total(group, "decode_tokens") / total(group, "decode_steps"),
                    "tokens": total(group, "decode_tokens"),
                    "same_as_plain": total(group, "same_as_plain"),
                    "prompts": total(group, "prompts"),
                }
            )
    return rows


def page(cells: Cells) -> ResultPage:
    rows = summarise(cells)
    temperature = cells[0]["temperature"]
    header = ("load", "system", "tokens/s", "over plain", "over `ngram`",
              "median TPOT better by", "p99 TPOT better by", "median pace better by",
              "p99 pace better by", "tokens per step", "tokens measured",
              *(() if temperature else ("answers as plain's",)))  # fmt: skip
    table = [
        [
            r["load"],
            r["system"],
            f"{r['tokens_per_s']:.1f}",
            "{:.2f} x ({:.2f} to {:.2f})".format(r["over_plain"], *r["over_plain_range"]),
            f"{format_number(r['over_ngram'], 2)} x" if r["over_ngram"] else "-",
            *(
                format_number(r[name], 2)
                for name in ("tpot_gain", "tpot_p99_gain", "pace_gain", "pace_p99_gain")
            ),
            f"{r['tokens_per_step']:.2f}",
            f"{r['tokens']}",
            *(() if temperature else (f"{r['same_as_plain']} of {r['prompts']}",)),
        ]
        for r in rows
    ]
    return ResultPage(
        name="lookups",
        title="Lookups beside plain decoding and vLLM's ngram",
        about="SmolLM2-135M-Instruct in bfloat16, "
        + (f"sampled at temperature {temperature:g}" if temperature else "greedy")
        + "; chat, code and maths prompts in turn, "
        "served by all systems side by side in one process, in turns of a second. Output tokens "
        "per CPU second of one thread, over the steps in which that many requests were decoded and "
        "no prompt was taken in. Ratios are medians of the rounds' ratios, in brackets the lowest "
        "and the highest. The head is the shipped JetSpec head under the adaptive budget, at most "
        "32 nodes; `ngram_tree` has its defaults; `no drafts` is `ngram_tree` with budget 0, which "
        "shows what the target's products bring; vLLM's `ngram` drafts 6 tokens after matches of 2 "
        "to 4. TPOT is a whole answer's, other requests' prompts and the last answers in smaller "
        "company included; answers have half to all of the most tokens."
        + ("" if temperature else TIES)
        + PACE
        + (AGAIN if any(r["system"] == "plain again" for r in rows) else ""),
        sections=[Section(header, table)],
        data=rows,
        made_by=[cell["provenance"] for cell in cells],
    )


def main() -> None:
    benchmark = Benchmark("lookups", __doc__)
    benchmark.add_comparison_flags(minutes=8.0, rounds=3, tokens=96)
    add = benchmark.parser.add_argument
    add("--concurrency", type=int, nargs="+", default=(1, 4, 8))
    add("--prompts", type=int, default=4, help="per round, in addition to 4 per concurrent request")
    add("--temperature", type=float, default=0.0, help="default: greedy")
    usual = [name for name in SYSTEMS if name not in ENGINES]
    add("--systems", nargs="+", default=usual, choices=list(SYSTEMS), metavar="SYSTEM",
        help=f"some of {', '.join(SYSTEMS)}; `{BASELINE}` always runs")  # fmt: skip
    args = benchmark.parse()
    systems = {name: s for name, s in SYSTEMS.items() if name in (BASELINE, *args.systems)}
    if not args.report_only:
        benchmark.compare(
            args, systems, lambda target: make_loads(args, target),
            engine={"max_num_seqs": max(args.concurrency), "max_num_batched_tokens": 2048},
            sampling={"max_tokens": args.tokens, "temperature": args.temperature},
            engine_of=ENGINES,
        )  # fmt: skip
    benchmark.publish(args, page(benchmark.cells(args)))


if __name__ == "__main__":
    main()
