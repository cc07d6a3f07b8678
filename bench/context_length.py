# SPDX-License-Identifier: Apache-2.0
"""Drafting against context length at batch 1: acceptance, cost of a draft, tokens per second.

    python bench/context_length.py --data PROMPTS [--rounds 3] [--contexts 512 2048]

Every prompt is a document (retrieved passages and articles of a file spec_bench_dev.jsonl, joined)
cut to the context and a request to summarise it, answered greedily by all systems side by side
(interleave.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from harness import BASELINE, HEADS, Benchmark, Cells, by_load, drafter_of, total
from interleave import Load, Serving

from vllm_specplug.bench.plan import VLLM_CONFIGS
from vllm_specplug.bench.result_page import ResultPage, Section

LONGSPEC = {"method": "longspec", "model": str(HEADS / "smollm2-135m-longspec")}
JETSPEC = {"method": "jetspec", "model": str(HEADS / "smollm2-135m-jetspec")}
TREE = {"num_speculative_tokens": 16, "tree_budget": 16}
SYSTEMS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    "ngram": VLLM_CONFIGS["ngram"],
    "longspec": {**LONGSPEC, **TREE, "ngram_topk": 0},
    "longspec + n-grams": {**LONGSPEC, **TREE},
    "longspec as shipped": {**LONGSPEC, "num_speculative_tokens": 16},
    "jetspec": {**JETSPEC, **TREE, "ngram_topk": 0},
    "jetspec + n-grams": {**JETSPEC, **TREE},
    "jetspec as shipped": {**JETSPEC, "num_speculative_tokens": 16},
}
QUESTION = "\n\nSummarize the documents above in a few sentences."
COLUMNS = {
    "tokens_per_step": ("Tokens per step (mean acceptance length)", 2),
    "draft_ms": ("Median draft, ms", 1),
    "step_ms": ("Median step, ms (verification and draft)", 1),
    "tokens_per_s": ("Tokens per second while decoding", 1),
}


def documents(data: Path, tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """`count` prompts of about `length` tokens, none of which shares a passage with another."""
    rows = [json.loads(line) for line in (data / "spec_bench_dev.jsonl").read_text().splitlines()]
    texts = [
        row["turns"][0] for row in rows if row.get("category") in ("rag", "summarization", "qa")
    ] or [row["turns"][0] for row in rows]
    texts.sort(key=len, reverse=True)
    prompts = []
    for i in range(count):
        ids: list[int] = []
        for text in texts[i::count] * 40:
            ids += tokenizer(text + "\n\n")["input_ids"]
            if len(ids) >= length - 48:
                break
        body = tokenizer.decode(ids[: length - 48])
        prompts.append(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": body + QUESTION}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )[-length:]
        )
    return prompts


def make_loads(args: Any, target: str) -> list[Load]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    return [
        Load(f"{context}", number, [prompt], 1)
        for context in args.contexts
        for number, prompt in enumerate(documents(args.data, tokenizer, args.rounds, context))
    ]


def draft_memory(serving: Serving) -> dict[str, int]:
    """Bytes that a request's drafts keep, where they do not grow with the context."""
    drafter = drafter_of(serving.llm)
    if drafter is None or drafter.window_spec() is None:
        return {}
    window = drafter.window
    return {"draft_bytes_per_request": window.kv_cache.nbytes // len(window.block_table)}


def summarise(cells: Cells) -> dict[int, dict[str, dict[str, float | None]]]:
    """The columns by context and system."""
    return {
        int(load): {
            name: {
                "tokens_per_step": total(group, "decode_tokens") / total(group, "decode_steps"),
                "draft_ms": median(ms) if (ms := [c["draft_ms"] for c in group if c["draft_ms"]])
                else None,
                "step_ms": median(c["step_ms"] for c in group),
                "tokens_per_s": total(group, "decode_tokens") / total(group, "decode_seconds"),
            }
            for name in SYSTEMS
            if (group := found.get(name))
        }
        for load, found in sorted(by_load(cells).items(), key=lambda item: int(item[0]))
    }  # fmt: skip


def page(cells: Cells) -> ResultPage:
    rows = summarise(cells)
    systems = list(next(iter(rows.values())))
    sections = []
    for key, (title, digits) in COLUMNS.items():
        table = [
            [
                f"{context:,}",
                *(f"{row[s][key]:.{digits}f}" if row[s][key] else "-" for s in systems),
            ]
            for context, row in rows.items()
        ]
        sections.append(Section(["context", *systems], table, title))
    sizes = {c["draft_bytes_per_request"] for c in cells if "draft_bytes_per_request" in c}
    notes = [f"Draft memory of a longspec request: {size:,} bytes at every context."
             for size in sizes]  # fmt: skip
    return ResultPage(
        name="context_length",
        title="Drafting against context length",
        about="SmolLM2-135M-Instruct, bfloat16, one request at a time, greedy, 64 tokens after a "
        "document and a request to summarise it. Trees of 16 nodes; as shipped: with n-grams and "
        "the adaptive budget (at most 16).",
        sections=[*sections, Section(notes=notes)],
        data=rows,
        made_by=[cell["provenance"] for cell in cells],
        figure=plot(rows, systems),
    )


def plot(rows: dict[int, dict[str, dict[str, float | None]]], systems: list[str]) -> Any:
    from vllm_specplug.bench.figures import add_legend, new_figure, place_measured, system_colors

    figure, axes = new_figure(columns=2, width=5, height=4)
    colors = system_colors(systems)
    for axis, (key, title) in zip(
        axes, {"tokens_per_step": "tokens per step", "draft_ms": "draft, ms"}.items(), strict=True
    ):
        for name in systems:
            points = [(context, row[name][key]) for context, row in rows.items() if row[name][key]]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=colors[name], label=name)
        place_measured(axis, rows)
        axis.set(xlabel="context, tokens", title=title)
        axis.set_ylim(bottom=0)
    add_legend(figure, axes[0])
    return figure


def main() -> None:
    benchmark = Benchmark("context_length", __doc__)
    benchmark.add_comparison_flags(minutes=30.0, rounds=3, tokens=64)
    benchmark.parser.add_argument(
        "--contexts", type=int, nargs="+", default=(512, 2048, 4096, 8000)
    )
    args = benchmark.parse()
    if not args.report_only:
        if not (args.data / "spec_bench_dev.jsonl").is_file():
            benchmark.parser.error(f"--data {args.data}: no spec_bench_dev.jsonl in it")
        benchmark.compare(
            args, SYSTEMS, lambda target: make_loads(args, target),
            engine={"max_num_seqs": 1, "max_model_len": 8192},
            sampling={"max_tokens": args.tokens, "ignore_eos": True}, observe=draft_memory,
        )  # fmt: skip
    benchmark.publish(args, page(benchmark.cells(args)))


if __name__ == "__main__":
    main()
