# SPDX-License-Identifier: Apache-2.0
"""Very long outputs at batch 1: speed against generated length, step time against context.

    python bench/long_outputs.py                                   8,000 tokens
    python bench/long_outputs.py --tokens 4096 --penalty 1.2       with the contextual penalty

One request, EOS ignored, greedy, answered by all systems side by side (interleave.py). With a
penalty the page is long_outputs_penalty.
"""

from __future__ import annotations

import importlib.util
from statistics import median
from typing import Any

from harness import BASELINE, HEADS, Benchmark, Cells, by_load, drafter_of
from interleave import Load, Serving

from vllm_specplug.bench.plan import VLLM_CONFIGS
from vllm_specplug.bench.result_page import ResultPage, Section

TOKENSWIFT = {
    "method": "tokenswift",
    "model": str(HEADS / "smollm2-135m-tokenswift"),
    "num_speculative_tokens": 16,
    "kv_budget": 1024,
}
SYSTEMS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    "ngram": VLLM_CONFIGS["ngram"],
    "suffix": VLLM_CONFIGS["suffix"],
    "ngram_tree": {"method": "ngram_tree", "num_speculative_tokens": 16},
    "tokenswift": TOKENSWIFT,
    "tokenswift-self": {**TOKENSWIFT, "draft_source": "self"},
    "tokenswift-heads": {**TOKENSWIFT, "draft_source": "heads"},
}
STOCK_METHODS = ("ngram", "suffix")
DEFAULT = (*STOCK_METHODS, "ngram_tree", "tokenswift")
PROMPT = (
    "Write a very long novel, chapter after chapter. It tells of a cartographer who maps an island "
    "that changes every night. Describe every place, every person and every conversation in full."
)
# Tokens of one point of the curves.
SEGMENT = 512
WINDOW = 1024
PROJECTED = 100_000
COUNTERS = {"accepted_from": ("heads", "ngrams", "both"), "steps_from": ("heads", "self", "ngrams")}


def make_loads(target: str) -> list[Load]:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(target).apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
    )
    return [Load("1 at once", 0, [ids], 1)]


def observe(serving: Serving) -> dict[str, Any]:
    """Steps by segment of the answer, how much of it is new, and who drafted it."""
    segments: list[dict[str, Any]] = []
    tokens, times = 1, []
    for number, (_, made, seconds) in enumerate(serving.steps):
        tokens += made
        times.append(1e3 * seconds)
        if tokens >= SEGMENT * (len(segments) + 1) or number + 1 == len(serving.steps):
            before = segments[-1]["tokens"] if segments else 1
            segments.append(
                {
                    "tokens": tokens,
                    "made": tokens - before,
                    "steps": len(times),
                    "seconds": sum(times) / 1e3,
                    "median_ms": median(times),
                }
            )
            times = []
    answer = serving.answers[0]
    counts = {}
    for name in COUNTERS:
        counter = getattr(drafter_of(serving.llm), name, None)
        if counter is not None:
            counts[name] = dict(counter)
            counter.clear()
    return {
        "prompt_tokens": len(serving.load.prompts[0]),
        "segments": segments,
        "distinct": {str(n): round(distinct(answer, n), 4) for n in (1, 2, 4)},
        **counts,
    }


def distinct(tokens: list[int], n: int) -> float:
    """Distinct n-grams over all n-grams of a text."""
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 0.0


def ms_per_token(segments: list[dict[str, Any]]) -> float:
    return 1e3 * sum(s["seconds"] for s in segments) / sum(s["made"] for s in segments)


def upto(cell: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
    """The segments that end within the first `tokens` tokens, or the first one."""
    return [s for s in cell["segments"] if s["tokens"] <= tokens] or cell["segments"][:1]


def line_through(
    points: list[tuple[float, float]], least_slope: float = 0.0
) -> tuple[float, float]:
    """a, b of a + b x, medians (Theil and Sen): a disturbed minute does not bend it."""
    slopes = [(y - v) / (x - u) for i, (x, y) in enumerate(points) for u, v in points[:i] if x != u]
    slope = max(median(slopes) if slopes else 0.0, least_slope)
    return median(y - slope * x for x, y in points), slope


def step_line(cell: dict[str, Any], least_slope: float = 0.0) -> tuple[float, float]:
    """Milliseconds of a step as a + b x context."""
    points = [
        (cell["prompt_tokens"] + s["tokens"] - s["made"] / 2, s["median_ms"])
        for s in cell["segments"]
    ]
    return line_through(points, least_slope)


def projected_speed_up(cell: dict[str, Any], plain: dict[str, Any], tokens: int) -> float:
    """Over `tokens` tokens, if steps go on costing a + b x context and yielding what the last two
    segments yielded."""
    a, b = step_line(plain)
    # No step attends less than one row does.
    own_a, own_b = step_line(cell, b)
    last = cell["segments"][-2:]
    per_step = sum(s["made"] for s in last) / sum(s["steps"] for s in last)
    return (a + b * tokens / 2) / (own_a + own_b * tokens / 2) * per_step


def page(benchmark: Benchmark, cells: Cells, penalty: float) -> ResultPage:
    found = {name: group[0] for name, group in by_load(cells)["1 at once"].items()}
    plain = found[BASELINE]
    tokens = plain["tokens"]
    rows = []
    for name, cell in found.items():
        segments, count = cell["segments"], max(1, len(cell["segments"]) // 4)

        def speed_up(part: list[dict[str, Any]]) -> str:
            last, first = part[-1]["tokens"], part[0]["tokens"] - part[0]["made"]
            beside = [s for s in plain["segments"] if first < s["tokens"] <= last + SEGMENT // 2]
            return f"{ms_per_token(beside or plain['segments']) / ms_per_token(part):.2f} x"

        counts = [
            " / ".join(str(cell[counter].get(n, 0)) for n in names) if counter in cell else ""
            for counter, names in COUNTERS.items()
        ]
        rows.append(
            [
                name,
                f"{1e3 / ms_per_token(segments):.1f}",
                *map(speed_up, (segments, upto(cell, 4096), segments[:count], segments[-count:])),
                f"{cell['decode_tokens'] / cell['decode_steps']:.2f}",
                " / ".join(f"{s['median_ms']:.0f}" for s in (segments[0], segments[-1])),
                " / ".join(f"{value:.2f}" for value in cell["distinct"].values()),
                *counts,
            ]
        )
    header = ("system", "tokens/s", "speed-up", "of the first 4,096", "first quarter",
              "last quarter", "tokens per step", "step ms, first / last segment",
              "distinct-1 / 2 / 4", "accepted from heads / n-grams / both",
              "steps from heads / self / n-grams")  # fmt: skip
    notes = []
    if len(plain["segments"]) > 3:
        a, b = step_line(plain)
        projected = ", ".join(
            f"{name} {projected_speed_up(cell, plain, PROJECTED):.1f} x"
            for name, cell in found.items()
            if name != BASELINE
        )
        notes.append(
            f"**Projection, not measured**, to {PROJECTED:,} tokens, from straight lines through "
            f"the median step times by context (plain: {a:.0f} ms and {1e3 * b:.1f} ms per 1,000 "
            f"tokens) and the last {2 * SEGMENT:,} tokens' yield: {projected}. This model's own "
            "context ends at 8,192."
        )
    ending = f", contextual penalty {penalty} over {WINDOW} tokens" if penalty else ""
    return ResultPage(
        name=benchmark.name,
        title=f"Very long outputs: {tokens:,} tokens{ending or ', no penalty'}",
        about="SmolLM2-135M-Instruct, bfloat16, one request, greedy, EOS ignored, context up to "
        "8,192; trees under the adaptive budget (at most 16 nodes), `kv_budget` 1024. Speed-up: "
        "plain vLLM's CPU time per token at the same length over the system's, side by side in one "
        "process. Accepted tokens are counted by who had drafted them; `self` counts as heads.\n\n"
        "**Mind the distinct-n column.** A small model's greedy text without a penalty falls into "
        "loops, which lookups follow for next to nothing: those speed-ups say what a method makes "
        "of a loop. With the contextual penalty the text repeats far less: that is the honest "
        "case.",
        sections=[Section(header, rows, notes=notes)],
        data=found,
        made_by=[cell["provenance"] for cell in cells],
        figure=plot(found),
    )


def plot(found: dict[str, dict[str, Any]]) -> Any:
    from vllm_specplug.bench.figures import add_legend, new_figure, system_colors

    figure, (speed, step) = new_figure(columns=2, width=5.5, height=4)
    colors = system_colors(SYSTEMS)
    plain = found[BASELINE]["segments"]
    for name, cell in found.items():
        points = [s["tokens"] for s in cell["segments"]]
        ratios = [
            ms_per_token([p]) / ms_per_token([s])
            for p, s in zip(plain, cell["segments"], strict=False)
        ]
        speed.plot(points[: len(ratios)], ratios, color=colors[name], label=name)
        step.plot(points, [s["median_ms"] for s in cell["segments"]], color=colors[name])
    speed.set(xlabel="generated tokens", ylabel="speed-up against plain vLLM")
    step.set(xlabel="generated tokens", ylabel="median ms per step")
    add_legend(figure, speed)
    return figure


def main() -> None:
    benchmark = Benchmark("long_outputs", __doc__)
    benchmark.add_comparison_flags(minutes=60.0, rounds=1, tokens=8000, data=False)
    add = benchmark.parser.add_argument
    add("--systems", nargs="+", choices=list(SYSTEMS)[1:], default=DEFAULT)
    add("--penalty", type=float, default=0.0, help="theta of the contextual penalty; 0: none")
    args = benchmark.parse()
    sampling: dict[str, Any] = {"max_tokens": args.tokens, "ignore_eos": True}
    engine: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 8192}
    missing = {"suffix"} if importlib.util.find_spec("arctic_inference") is None else set()
    if args.penalty:
        benchmark.name += "_penalty"
        sampling["extra_args"] = {
            "specplug_penalty": args.penalty, "specplug_penalty_window": WINDOW
        }  # fmt: skip
        # The contextual penalty needs the latest tokens; vLLM's own methods do not apply it.
        engine["async_scheduling"] = False
        missing |= set(STOCK_METHODS)
    for system in missing.intersection(args.systems):
        print(f"{system} is left out: it does not run here")
    systems = {s: SYSTEMS[s] for s in (BASELINE, *args.systems) if s not in missing}
    if not args.report_only:
        benchmark.compare(
            args, systems, make_loads, engine=engine, sampling=sampling, observe=observe
        )
    benchmark.publish(args, page(benchmark, benchmark.cells(args), args.penalty))


if __name__ == "__main__":
    main()
