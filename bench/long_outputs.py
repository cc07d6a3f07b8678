# SPDX-License-Identifier: Apache-2.0
"""Very long outputs at batch 1: speed against generated length, step time against context.

    python bench/long_outputs.py                                   every system, 8,000 tokens
    python bench/long_outputs.py --systems ngram,tokenswift
    python bench/long_outputs.py --tokens 4096 --penalty 1.2       with the contextual penalty
    python bench/long_outputs.py --report                          tables and plot anew

One process a system, one request, EOS ignored, greedy. Plain vLLM is up in the same process: every
256 tokens it goes on from the same text for a few steps, so that both are timed at the same context
and in the same minute, whatever else the machine does. Every run is kept in long_outputs.json of
the folder --out (bench/results) and replaces the same one of before.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from vllm_specplug.bench.plan import VLLM_CONFIGS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
HEAD = ROOT / "heads" / "smollm2-135m-tokenswift"
TOKENSWIFT = {
    "method": "tokenswift",
    "model": str(HEAD),
    "num_speculative_tokens": 16,
    "kv_budget": 1024,
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "ngram": VLLM_CONFIGS["ngram"],
    "suffix": VLLM_CONFIGS["suffix"],
    "ngram_tree": {"method": "ngram_tree", "num_speculative_tokens": 16},
    "tokenswift": TOKENSWIFT,
    "tokenswift-self": {**TOKENSWIFT, "draft_source": "self"},
    "tokenswift-heads": {**TOKENSWIFT, "draft_source": "heads"},
}
VLLMS_OWN = ("ngram", "suffix")
DEFAULT = (*VLLMS_OWN, "ngram_tree", "tokenswift")
PROMPT = (
    "Write a very long novel, chapter after chapter. It tells of a cartographer who maps an island "
    "that changes every night. Describe every place, every person and every conversation in full."
)
# Tokens of one point of the curves.
SEGMENT = 512
# Tokens after which plain decoding is timed, and for how many steps.
PROBE_EVERY, PROBE_STEPS = 256, 12
WINDOW = 1024
PROJECTED = 100_000


def distinct(tokens: list[int], n: int) -> float:
    """Distinct n-grams over all n-grams of a text."""
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 0.0


def make_engine(target: str, speculative: dict[str, Any] | None, penalty: float) -> Any:
    """An engine of this process for one request at a time."""
    from vllm import LLM

    llm = LLM(
        model=target,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=1,
        # Plain decoding reads the text again and again.
        enable_prefix_caching=speculative is None,
        # The contextual penalty needs the latest tokens.
        **({"async_scheduling": False} if penalty else {}),
        **({} if speculative is None else {"speculative_config": speculative}),
    )
    return llm.llm_engine


def plain_step_ms(engine: Any, token_ids: list[int], params: Any, name: str) -> list[float]:
    """Milliseconds of single decoding steps after a text."""
    engine.add_request(name, {"prompt_token_ids": token_ids}, params)
    times, made = [], 0
    last = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        # The first token comes from reading the text.
        if made:
            times.append(1e3 * (now - last))
        made += bool(outputs)
        last = now
    return times


def run_cell(system: str, tokens: int, penalty: float, setting: str) -> dict[str, Any]:
    """Generates `tokens` tokens; what a step took and yielded, by segment, beside plain steps."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    from vllm_specplug.bench.provenance import provenance
    from vllm_specplug.targets import prepare_target

    target = prepare_target("smollm2")
    plain = make_engine(str(target), None, penalty)
    engine = make_engine(str(target), SYSTEMS[system], penalty)
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

    for warm in (plain, engine):
        plain_step_ms(warm, ids, params(24), "warm")
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = getattr(getattr(runner, "drafter", None), "drafter", None)
    counts = {}
    if hasattr(drafter, "accepted_from"):
        counts = {"accepted_from": drafter.accepted_from, "steps_from": drafter.steps_from}
    for counter in counts.values():
        counter.clear()

    engine.add_request("long", {"prompt_token_ids": ids}, params(tokens))
    output: list[int] = []
    steps: list[tuple[int, float]] = []  # tokens after the step, its milliseconds
    probes: list[tuple[int, float]] = []  # the same of plain steps
    last = time.perf_counter()
    while engine.has_unfinished_requests():
        for result in engine.step():
            output = list(result.outputs[0].token_ids)
        now = time.perf_counter()
        steps.append((len(output), 1e3 * (now - last)))
        if len(output) // PROBE_EVERY > len(probes) // PROBE_STEPS:
            name = f"after-{len(output)}"
            text = ids + output[: 8191 - len(ids) - PROBE_STEPS]
            for ms in plain_step_ms(plain, text, params(PROBE_STEPS + 1), name):
                probes.append((len(output), ms))
            _forget_pause(runner, drafter)
        last = time.perf_counter()
    segments = []
    for first in range(0, tokens, SEGMENT):
        own = [ms for count, ms in steps if first < count <= first + SEGMENT]
        beside = [ms for count, ms in probes if first < count <= first + SEGMENT]
        if own and beside:
            segments.append(
                {
                    "tokens": min(first + SEGMENT, tokens),
                    "seconds": sum(own) / 1e3,
                    "made": min(first + SEGMENT, tokens) - first,
                    "steps": len(own),
                    "median_ms": median(own),
                    "plain_ms": median(beside),
                }
            )
    command = f"long_outputs.py --systems {system} --tokens {tokens}"
    command += f" --penalty {penalty}" if penalty else ""
    return {
        "system": system,
        "tokens": len(output),
        "penalty": penalty,
        "prompt_tokens": len(ids),
        "segments": segments,
        "distinct": {str(n): round(distinct(output, n), 4) for n in (1, 2, 3, 4)},
        "setting": setting,
        "provenance": {**provenance(), "command": command},
        **{name: dict(counter) for name, counter in counts.items()},
    }


def _forget_pause(runner: Any, drafter: Any) -> None:
    """Lets what measures itself while serving not take a pause of this script for a slow step."""
    if drafter is not None:
        runner.planner._step_start = 0.0
        if hasattr(drafter, "accepted_from"):
            drafter._began = None


def key_of(cell: dict[str, Any]) -> str:
    return f"{cell['system']}/{cell['tokens']}/{cell['penalty']}"


def load(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "long_outputs.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def store(cell: dict[str, Any], folder: Path) -> None:
    cells = {**load(folder), key_of(cell): cell}
    text = json.dumps(dict(sorted(cells.items())), indent=1)
    (folder / "long_outputs.json").write_text(text + "\n")


def seconds(segments: list[dict[str, Any]], kind: str) -> float:
    """Time of these segments.

    kind: "own", as it was; "steady", had every step taken its segment's median, which a passing
    disturbance does not change; "plain", for as many plain steps as tokens.
    """
    if kind == "own":
        return sum(s["seconds"] for s in segments)
    if kind == "steady":
        return sum(s["steps"] * s["median_ms"] for s in segments) / 1e3
    return sum(s["made"] * s["plain_ms"] for s in segments) / 1e3


def context_of(cell: dict[str, Any], segment: dict[str, Any]) -> float:
    """Tokens before the middle of a segment."""
    return cell["prompt_tokens"] + segment["tokens"] - segment["made"] / 2


def line_through(
    points: list[tuple[float, float]], least_slope: float = 0.0
) -> tuple[float, float]:
    """a, b of a + b x, medians (Theil and Sen): a disturbed minute does not bend it."""
    slopes = [(y - v) / (x - u) for i, (x, y) in enumerate(points) for u, v in points[:i] if x != u]
    slope = max(median(slopes) if slopes else 0.0, least_slope)
    return median(y - slope * x for x, y in points), slope


def plain_line(cells: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Milliseconds of a plain step as a + b x context."""
    return line_through([(context_of(c, s), s["plain_ms"]) for c in cells for s in c["segments"]])


def projected_speed_up(cell: dict[str, Any], plain: tuple[float, float], tokens: int) -> float:
    """Over `tokens` tokens, if steps go on costing a + b x context and yielding what the last two
    segments yielded. The system's steps are taken relative to the plain steps beside them."""
    a, b = plain
    points = []
    for segment in cell["segments"]:
        context = context_of(cell, segment)
        points.append((context, (a + b * context) * segment["median_ms"] / segment["plain_ms"]))
    # No step attends less than one row does.
    own_a, own_b = line_through(points, b)
    last = cell["segments"][-2:]
    per_step = sum(s["made"] for s in last) / sum(s["steps"] for s in last)
    return (a + b * tokens / 2) / (own_a + own_b * tokens / 2) * per_step


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
        "of a loop. With the contextual penalty the text repeats far less: that is the "
        "honest case.",
        "",
        "Speed-up is against plain vLLM in the same process, timed for a few steps every "
        f"{PROBE_EVERY} tokens at the same context: as many of its median steps as there are "
        "tokens, over the system's wall-clock time; in brackets over its median steps, which "
        "leaves out what else the machine did and the trials of other sources. Accepted tokens "
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
            lines += _table(group, tokens, penalty, plain_line(cells.values()))
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
    group: list[dict[str, Any]], tokens: int, penalty: float, plain: tuple[float, float]
) -> list[str]:
    title = f"contextual penalty {penalty} over {WINDOW} tokens" if penalty else "no penalty"
    lines = [
        f"## {tokens:,} tokens, {title}",
        "",
        "| system | tok/s (plain) | speed-up (median steps) | of the first 4,096 | first quarter | "
        "last quarter | tokens a step | step ms, first / last segment (plain) | "
        "distinct-1 / 2 / 4 | accepted from heads / n-grams / both | "
        "steps from heads / self / n-grams |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in group:
        segments = cell["segments"]
        count = max(1, len(segments) // 4)
        made, own = sum(s["made"] for s in segments), seconds(segments, "own")
        beside = seconds(segments, "plain")
        begun = [s for s in segments if s["tokens"] <= 4096]
        columns = [
            cell["system"],
            f"{made / own:.1f} ({made / beside:.1f})",
            f"{_speed_up(segments)} ({beside / seconds(segments, 'steady'):.2f} x)",
            _speed_up(begun),
            _speed_up(segments[:count]),
            _speed_up(segments[-count:]),
            f"{made / sum(s['steps'] for s in segments):.2f}",
            " / ".join(
                f"{s['median_ms']:.0f} ({s['plain_ms']:.0f})" for s in (segments[0], segments[-1])
            ),
            " / ".join(f"{cell['distinct'][n]:.2f}" for n in ("1", "2", "4")),
            _counts(cell.get("accepted_from"), ("heads", "ngrams", "both")),
            _counts(cell.get("steps_from"), ("heads", "self", "ngrams")),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    lines.append("")
    long = [c for c in group if len(c["segments"]) > 3]
    if long:
        told = [f"{c['system']} {projected_speed_up(c, plain, PROJECTED):.1f} x" for c in long]
        lines += [
            f"**Projection, not measured**, to {PROJECTED:,} tokens, from straight lines through "
            f"the median step times by context (plain: {plain[0]:.0f} ms and {1e3 * plain[1]:.1f} "
            f"ms per 1,000 tokens) and the last {2 * SEGMENT:,} tokens' yield: "
            + ", ".join(told)
            + ". This model's own context ends at 8,192.",
            "",
        ]
    return lines


def _speed_up(segments: list[dict[str, Any]]) -> str:
    return f"{seconds(segments, 'plain') / seconds(segments, 'own'):.2f} x"


def _counts(counts: dict[str, int] | None, names: tuple[str, ...]) -> str:
    return "" if counts is None else " / ".join(str(counts.get(name, 0)) for name in names)


def plot(cells: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for cell in cells.values():
        name = cell["system"] + (f", penalty {cell['penalty']}" if cell["penalty"] else "")
        segments = cell["segments"]
        points = [s["tokens"] for s in segments]
        style = "--" if cell["penalty"] else "-"
        ratios = [seconds([s], "plain") / seconds([s], "own") for s in segments]
        (line,) = axes[0].plot(points, ratios, style, label=name)
        own, beside = ([s[field] for s in segments] for field in ("median_ms", "plain_ms"))
        axes[1].plot(points, own, style, color=line.get_color(), label=name)
        axes[1].plot(points, beside, ":", color=line.get_color(), linewidth=0.8)
    axes[0].axhline(1.0, color="grey", linewidth=1)
    axes[0].set(xlabel="generated tokens", ylabel="speed-up against plain vLLM")
    axes[1].set(xlabel="generated tokens", ylabel="median ms a step (dotted: plain beside it)")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", help="default: " + ",".join(DEFAULT))
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
    systems = args.systems.split(",") if args.systems else list(DEFAULT)
    if args.penalty:
        # They are refused: vLLM's own speculative methods do not apply it.
        systems = [system for system in systems if system not in VLLMS_OWN]
    if args.report:
        systems = []
    unknown = set(systems) - set(SYSTEMS)
    if unknown:
        parser.error(f"unknown systems {sorted(unknown)}; known: {', '.join(SYSTEMS)}")
    for system in systems:
        if system == "suffix" and not _has("arctic_inference"):
            print("suffix: skipped, the package arctic-inference is not installed", flush=True)
            continue
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [sys.executable, __file__, "--cell", system]
        command += ["--tokens", str(args.tokens), "--penalty", str(args.penalty)]
        command += ["--out", str(args.out), "--setting", args.setting]
        subprocess.run(command, check=True, env={**env, **os.environ})
        cell = load(args.out)[f"{system}/{args.tokens}/{args.penalty}"]
        print(f"{system}: {_speed_up(cell['segments'])}", flush=True)
    cells = load(args.out)
    (args.out / "long_outputs.md").write_text(report(cells))
    plot(cells, args.out / "long_outputs.png")


if __name__ == "__main__":
    main()
