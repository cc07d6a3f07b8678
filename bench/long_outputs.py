# SPDX-License-Identifier: Apache-2.0
"""Very long outputs at batch 1: speed against generated length, step time against context.

    python bench/long_outputs.py                                   every system, 8,000 tokens
    python bench/long_outputs.py --systems plain,tokenswift
    python bench/long_outputs.py --tokens 4096 --penalty 1.2       with the contextual penalty
    python bench/long_outputs.py --report                          tables and plot anew

One engine a process, one request, EOS ignored, greedy. Every run is kept in
long_outputs.json of the folder --out (bench/results) and replaces the same one of before.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
HEAD = ROOT / "heads" / "smollm2-135m-tokenswift"
TOKENSWIFT = {
    "method": "tokenswift",
    "model": str(HEAD),
    "num_speculative_tokens": 16,
    "kv_budget": 1024,
}
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
    "ngram_tree": {"method": "ngram_tree", "num_speculative_tokens": 16},
    "tokenswift": TOKENSWIFT,
    "tokenswift-self": {**TOKENSWIFT, "draft_source": "self"},
    "tokenswift-heads": {**TOKENSWIFT, "draft_source": "heads"},
}
PROMPT = (
    "Write a very long novel, chapter after chapter. It tells of a cartographer who maps an island "
    "that changes every night. Describe every place, every person and every conversation in full."
)
# Tokens of one point of the curves.
SEGMENT = 512
WINDOW = 1024
PROJECTED = 100_000


def distinct(tokens: list[int], n: int) -> float:
    """Distinct n-grams over all n-grams of a text."""
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 0.0


def run_cell(system: str, tokens: int, penalty: float, setting: str) -> dict[str, Any]:
    """Generates `tokens` tokens on one engine; what a step took and yielded, by segment."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from vllm_specplug.bench.provenance import provenance
    from vllm_specplug.targets import prepare_target

    target = prepare_target("smollm2")
    options = {} if SYSTEMS[system] is None else {"speculative_config": SYSTEMS[system]}
    llm = LLM(
        model=str(target),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=1,
        enable_prefix_caching=False,
        **options,
    )
    ids = AutoTokenizer.from_pretrained(target).apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    extra = {"specplug_penalty": penalty, "specplug_penalty_window": WINDOW} if penalty else None

    def params(count: int) -> Any:
        return SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=extra
        )

    llm.generate({"prompt_token_ids": ids}, params(24), use_tqdm=False)
    engine = llm.llm_engine
    drafter = _drafter(engine)
    if drafter is not None and hasattr(drafter, "accepted_from"):
        drafter.accepted_from.clear()
        drafter.steps_from.clear()
    engine.add_request("long", {"prompt_token_ids": ids}, params(tokens))
    output: list[int] = []
    steps: list[tuple[int, float]] = []  # tokens after the step, its milliseconds
    began = last = time.perf_counter()
    while engine.has_unfinished_requests():
        for result in engine.step():
            output = list(result.outputs[0].token_ids)
        now = time.perf_counter()
        steps.append((len(output), 1e3 * (now - last)))
        last = now
    segments = []
    for first in range(0, tokens, SEGMENT):
        own = [ms for count, ms in steps if first < count <= first + SEGMENT]
        if own:
            made = min(first + SEGMENT, tokens) - first
            segments.append(
                {
                    "tokens": first + made,
                    "seconds": sum(own) / 1e3,
                    "made": made,
                    "steps": len(own),
                    "median_ms": median(own),
                }
            )
    cell = {
        "system": system,
        "tokens": len(output),
        "penalty": penalty,
        "prompt_tokens": len(ids),
        "seconds": last - began,
        "steps": len(steps),
        "segments": segments,
        "distinct": {str(n): round(distinct(output, n), 4) for n in (1, 2, 3, 4)},
        "setting": setting,
        "provenance": provenance(),
    }
    if drafter is not None and hasattr(drafter, "accepted_from"):
        cell["accepted_from"] = dict(drafter.accepted_from)
        cell["steps_from"] = dict(drafter.steps_from)
    return cell


def _drafter(engine: Any) -> Any:
    """Our drafter inside an engine of this process; None where another method runs."""
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    proposer = getattr(worker.model_runner, "drafter", None)
    return getattr(proposer, "drafter", None)


def key_of(cell: dict[str, Any]) -> str:
    return f"{cell['system']}/{cell['tokens']}/{cell['penalty']}"


def load(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "long_outputs.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def baseline(
    cells: dict[str, dict[str, Any]], tokens: int, penalty: float
) -> dict[str, Any] | None:
    """Plain decoding of as many tokens: a run of its own, or the beginning of a longer one."""
    longer = [
        c
        for c in cells.values()
        if c["system"] == "plain" and c["penalty"] == penalty and c["tokens"] >= tokens
    ]
    if not longer:
        return None
    cell = min(longer, key=lambda c: c["tokens"])
    if cell["tokens"] == tokens:
        return cell
    segments = [s for s in cell["segments"] if s["tokens"] <= tokens]
    seconds = sum(s["seconds"] for s in segments)
    assert segments[-1]["tokens"] == tokens, "give a multiple of the segment"
    return {**cell, "tokens": tokens, "segments": segments, "seconds": seconds}


def store(cell: dict[str, Any], folder: Path) -> None:
    cells = {**load(folder), key_of(cell): cell}
    text = json.dumps(dict(sorted(cells.items())), indent=1)
    (folder / "long_outputs.json").write_text(text + "\n")


def steady_seconds(cell: dict[str, Any]) -> float:
    """Seconds, had every step of a segment taken its median: what a passing disturbance of the
    machine does not change."""
    return sum(s["steps"] * s["median_ms"] for s in cell["segments"]) / 1e3


def step_line(cell: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of a median step as a + b x context, least squares over the segments."""
    points = [
        (s["tokens"] - s["made"] / 2 + cell["prompt_tokens"], s["median_ms"])
        for s in cell["segments"]
    ]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return mean_y - slope * mean_x, slope


def projected_seconds(cell: dict[str, Any], tokens: int) -> float:
    """Seconds for `tokens` tokens, if steps go on costing a + b x context and yielding what the
    last two segments yielded."""
    a, b = step_line(cell)
    last = cell["segments"][-2:]
    per_step = sum(s["made"] for s in last) / sum(s["steps"] for s in last)
    return (a * tokens + b * tokens**2 / 2) / per_step / 1e3


def report(cells: dict[str, dict[str, Any]]) -> str:
    settings = sorted({c["setting"] for c in cells.values() if c["setting"]})
    lines = [
        "# Very long outputs",
        "",
        "SmolLM2-135M-Instruct, bfloat16, eager, one request, greedy, EOS ignored, context up to "
        "8,192; trees under the adaptive budget (at most 16 nodes), `kv_budget` 1024. Made by "
        "`python bench/long_outputs.py`"
        + (f" ({'; '.join(settings)})" if settings else "")
        + "; commit, versions and hardware of every run are in "
        "[long_outputs.json](long_outputs.json). One run of each.",
        "",
        "**Mind the distinct-n columns.** A small model's greedy text without a penalty falls into "
        "loops, which lookups follow for next to nothing: those speed-ups say what a method makes "
        "of a loop. With the contextual penalty nothing repeats within its window, and lookups "
        "find next to nothing: that is the other end.",
        "",
        "Speed-up is plain vLLM's wall-clock time over the system's; beside it what it would be "
        "had every step taken its segment's median time, which leaves out what else the machine "
        "did meanwhile, and the trials of other sources. Steps' times are medians. Accepted tokens "
        "are counted by who had drafted them; `self` counts as heads.",
        "",
    ]
    for penalty in sorted({c["penalty"] for c in cells.values()}):
        for tokens in sorted({c["tokens"] for c in cells.values() if c["penalty"] == penalty}):
            group = [
                cells[f"{s}/{tokens}/{penalty}"]
                for s in SYSTEMS
                if f"{s}/{tokens}/{penalty}" in cells
            ]
            plain = baseline(cells, tokens, penalty)
            lines += _table(group, plain, tokens, penalty)
    if any(c["system"] == "suffix" for c in cells.values()):
        lines += [
            "vLLM's `suffix` method ran with the package arctic-inference, its extension compiled "
            "from source for this machine.",
            "",
        ]
    else:
        lines += [
            "vLLM's `suffix` method is missing from these tables: it needs the package "
            "arctic-inference, which the machine that measured did not have.",
            "",
        ]
    return "\n".join(lines)


def _table(
    group: list[dict[str, Any]], plain: dict[str, Any] | None, tokens: int, penalty: float
) -> list[str]:
    title = f"contextual penalty {penalty} over {WINDOW} tokens" if penalty else "no penalty"
    lines = [
        f"## {tokens:,} tokens, {title}",
        "",
        "| system | tok/s | speed-up (median steps) | of the first 4,096 | first quarter | "
        "last quarter | tokens a step | step ms, first / last segment | distinct-1 / 2 / 4 | "
        "accepted from heads / n-grams / both | steps from heads / self / n-grams |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in group:
        rate = cell["tokens"] / cell["seconds"]
        ratio = ""
        if plain is not None:
            steady = steady_seconds(plain) / steady_seconds(cell)
            ratio = f"{plain['seconds'] / cell['seconds']:.2f} x ({steady:.2f} x)"
        first, last = (_quarter_ratio(cell, plain, end) for end in (False, True))
        segments = cell["segments"]
        early, late = (s["median_ms"] for s in (segments[0], segments[-1]))
        grams = " / ".join(f"{cell['distinct'][n]:.2f}" for n in ("1", "2", "4"))
        told = _counts(cell.get("accepted_from"), ("heads", "ngrams", "both"))
        steps = _counts(cell.get("steps_from"), ("heads", "self", "ngrams"))
        lines.append(
            f"| {cell['system']} | {rate:.1f} | {ratio} | {_ratio_to(cell, plain, 4096)} | "
            f"{first} | {last} | "
            f"{cell['tokens'] / cell['steps']:.2f} | {early:.0f} / {late:.0f} | {grams} | {told} | "
            f"{steps} |"
        )
    lines.append("")
    if plain is not None and len(plain["segments"]) > 3:
        base = projected_seconds(plain, PROJECTED)
        told = [
            f"{c['system']} {base / projected_seconds(c, PROJECTED):.2f} x"
            for c in group
            if c is not plain
        ]
        a, b = step_line(plain)
        lines += [
            f"**Projection, not measured**, to {PROJECTED:,} tokens from the fitted step times "
            f"(plain: {a:.1f} ms + {1e3 * b:.2f} ms per 1,000 tokens of context) and the last "
            f"{2 * SEGMENT:,} tokens' yield: " + ", ".join(told) + ". This model's own context "
            "ends at 8,192.",
            "",
        ]
    return lines


def _counts(counts: dict[str, int] | None, names: tuple[str, ...]) -> str:
    return "" if counts is None else " / ".join(str(counts.get(name, 0)) for name in names)


def _ratio_to(cell: dict[str, Any], plain: dict[str, Any] | None, tokens: int) -> str:
    """Speed-up over the first `tokens` tokens."""
    if plain is None:
        return ""
    own, other = (
        sum(s["seconds"] for s in c["segments"] if s["tokens"] <= tokens) for c in (cell, plain)
    )
    return f"{other / own:.2f} x"


def _quarter_ratio(cell: dict[str, Any], plain: dict[str, Any] | None, end: bool) -> str:
    if plain is None:
        return ""
    count = max(1, len(cell["segments"]) // 4)
    part = slice(-count, None) if end else slice(0, count)
    own, other = (sum(s["seconds"] for s in c["segments"][part]) for c in (cell, plain))
    return f"{other / own:.2f} x"


def plot(cells: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for cell in cells.values():
        plain = baseline(cells, cell["tokens"], cell["penalty"])
        name = cell["system"] + (f", penalty {cell['penalty']}" if cell["penalty"] else "")
        label = f"{name}, {cell['tokens']:,}"
        points = [s["tokens"] for s in cell["segments"]]
        axes[1].plot(points, [s["median_ms"] for s in cell["segments"]], label=label)
        if plain is not None and cell["system"] != "plain":
            axes[0].plot(
                points,
                [
                    p["seconds"] / s["seconds"]
                    for p, s in zip(plain["segments"], cell["segments"], strict=False)
                ],
                label=label,
            )
    axes[0].set(xlabel="generated tokens", ylabel="speed-up against plain vLLM")
    axes[1].set(xlabel="generated tokens", ylabel="ms a step")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", default="plain,ngram,suffix,ngram_tree,tokenswift")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--penalty", type=float, default=0.0, help="theta; 0: none")
    parser.add_argument("--setting", default="", help="words on the machine's state, for the page")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--cell", help="internal: run one system in this process")
    parser.add_argument("--report", action="store_true", help="only write tables and plot")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.cell:
        store(run_cell(args.cell, args.tokens, args.penalty, args.setting), args.out)
        return
    systems = [] if args.report else args.systems.split(",")
    unknown = set(systems) - set(SYSTEMS)
    if unknown:
        parser.error(f"unknown systems {sorted(unknown)}; known: {', '.join(SYSTEMS)}")
    for system in systems:
        if system == "suffix" and not _has("arctic_inference"):
            print("suffix: skipped, the package arctic-inference is not installed", flush=True)
            continue
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [sys.executable, __file__, "--cell", system]
        command += ["--tokens", str(args.tokens), "--penalty", str(args.penalty)]
        command += ["--out", str(args.out), "--setting", args.setting]
        subprocess.run(command, check=True, env={**env, **os.environ})
        cell = load(args.out)[f"{system}/{args.tokens}/{args.penalty}"]
        print(f"{system}: {cell['tokens'] / cell['seconds']:.1f} tok/s", flush=True)
    cells = load(args.out)
    (args.out / "long_outputs.md").write_text(report(cells))
    plot(cells, args.out / "long_outputs.png")


if __name__ == "__main__":
    main()
