# SPDX-License-Identifier: Apache-2.0
"""Block heads with and without a local head against plain vLLM, in one process and in turns.

    python bench/fused_heads.py --data FOLDER --out bench/results/fused_heads.md

Builds one engine for every line of the table (plain, JetSpec, DDTree and DeLS, chains and trees of
equal budget), then lets each answer the same prompts in turn, round by round, greedy. Prints
tokens/s with the ratio to plain, mean acceptance length, and the time of a draft. Ratios are within
one run.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# All engines live here and take turns.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

ROOT = Path(__file__).resolve().parents[1]
CHAIN = {"tree_width": 1}


MARKOV = {
    "local_head": str(ROOT / "heads" / "smollm2-135m-dels-markov"),
    # The best of the grid in bench/results/dels_acceptance.md.
    "alpha": 0.6,
    "beta": 0.5,
}
HEADS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("JetSpec", "jetspec", {}),
    ("DFlash", "ddtree", {}),
    ("DeLS GRU", "dels", {}),
    ("DeLS Markov", "dels", MARKOV),
)


def configurations(nodes: int) -> dict[str, dict[str, Any] | None]:
    """Name of a line to its --speculative-config; None is plain vLLM."""
    from vllm_specplug.targets import speculative_config

    shared = {"num_speculative_tokens": nodes, "tree_budget": nodes, "ngram_topk": 0}
    lines: dict[str, dict[str, Any] | None] = {"plain": None}
    for name, method, extra in HEADS:
        config = {**speculative_config("smollm2", method), **extra, **shared}
        lines[f"{name} chain"] = {**config, **CHAIN}
        lines[f"{name} tree"] = config
    del lines["JetSpec chain"]
    return lines


class Recorder:
    """What the engine that runs now tells its statistics."""

    def __init__(self) -> None:
        from vllm_specplug.metrics.step_stats import StepStats

        self.reset()
        draft, milliseconds = StepStats.observe_draft, StepStats.observe_ms

        def observe_draft(stats: StepStats, num_nodes: int, num_accepted: int) -> None:
            self.drafts += 1
            self.accepted += num_accepted
            draft(stats, num_nodes, num_accepted)

        def observe_ms(stats: StepStats, phase: str, value: float) -> None:
            if phase == "draft":
                self.draft_ms.append(value)
            milliseconds(stats, phase, value)

        StepStats.observe_draft = observe_draft  # type: ignore[method-assign]
        StepStats.observe_ms = observe_ms  # type: ignore[method-assign]

    def reset(self) -> None:
        self.drafts = self.accepted = 0
        self.draft_ms: list[float] = []


def token_prompts(folder: Path, count: int, model: str) -> list[list[int]]:
    """Chat, code and maths in turn, under the model's chat template."""
    from transformers import AutoTokenizer

    from vllm_specplug.bench.prompts import load_sets, mixed_prompts

    files = sorted(folder.glob("*_dev.jsonl"))
    sets = [s.prompts for s in load_sets(files)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for text in mixed_prompts(sets, 0, count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of *_dev.jsonl prompts")
    parser.add_argument("--out", type=Path, help="markdown file to write")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--batches", default="1,4")
    parser.add_argument(
        "--time-limit", type=float, default=300.0, help="seconds; stops a round late"
    )
    args = parser.parse_args()
    start = time.perf_counter()

    from vllm import LLM, SamplingParams

    from vllm_specplug.targets import prepare_target

    model = str(prepare_target("smollm2"))
    prompts = token_prompts(args.data, args.prompts, model)
    recorder = Recorder()
    engines: dict[str, Any] = {}
    lines = configurations(args.nodes)
    for name, config in lines.items():
        engines[name] = LLM(
            model,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=8,
            enable_prefix_caching=False,
            speculative_config=config,
        )
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len)
    for engine in engines.values():
        engine.generate([{"prompt_token_ids": prompts[0]}], params, use_tqdm=False)

    results = []
    for batch in (int(size) for size in args.batches.split(",")):
        totals: dict[str, dict[str, Any]] = {
            name: {"seconds": [], "tokens": [], "drafts": 0, "accepted": 0, "draft_ms": []}
            for name in engines
        }
        for first in range(0, len(prompts) - batch + 1, batch):
            if time.perf_counter() - start > args.time_limit:
                break
            group = [{"prompt_token_ids": ids} for ids in prompts[first : first + batch]]
            for name, engine in engines.items():
                recorder.reset()
                begin = time.perf_counter()
                outputs = engine.generate(group, params, use_tqdm=False)
                total = totals[name]
                total["seconds"].append(time.perf_counter() - begin)
                total["tokens"].append(sum(len(o.outputs[0].token_ids) for o in outputs))
                total["drafts"] += recorder.drafts
                total["accepted"] += recorder.accepted
                total["draft_ms"] += recorder.draft_ms
        results.append((batch, totals))
    text = report(results, args)
    print(text)
    if args.out:
        args.out.write_text(text)


def report(results: list[tuple[int, dict[str, dict[str, Any]]]], args: argparse.Namespace) -> str:
    """The table of every batch size as markdown."""
    import torch
    import vllm

    from vllm_specplug.bench.provenance import commit

    rows = [
        "# Block heads with and without a local head",
        "",
        f"`python {shlex.join(sys.argv)}`",
        "",
        f"vLLM {vllm.__version__}, torch {torch.__version__}, commit {commit()}, "
        f"{len(os.sched_getaffinity(0))} core(s) of {cpu_name()}, SmolLM2-135M-Instruct in "
        f"bfloat16, greedy, {args.nodes} nodes a tree, no n-gram branches. The engines answer the "
        "same prompts in turn; ratios are within this run.",
    ]
    for batch, totals in results:
        plain = sum(totals["plain"]["tokens"]) / sum(totals["plain"]["seconds"])
        rounds = len(totals["plain"]["seconds"])
        rows += [
            "",
            f"## {batch} at once ({rounds} rounds)",
            "",
            "| | tokens/s | against plain | mean acceptance length | draft, ms (median) |",
            "|---|---|---|---|---|",
        ]
        for name, total in totals.items():
            speed = sum(total["tokens"]) / sum(total["seconds"])
            length = draft = "-"
            if total["drafts"]:
                length = f"{1 + total['accepted'] / total['drafts']:.2f}"
                draft = f"{statistics.median(total['draft_ms']):.2f}"
            rows.append(f"| {name} | {speed:.1f} | {speed / plain:.2f} x | {length} | {draft} |")
        for shape in ("chain", "tree"):
            alone, gru, markov = (
                statistics.median(totals[f"{name} {shape}"]["draft_ms"])
                for name in ("DFlash", "DeLS GRU", "DeLS Markov")
            )
            rows += [
                "",
                f"The local head adds {100 * (gru / alone - 1):.0f} % (GRU) and "
                f"{100 * (markov / alone - 1):.0f} % (Markov) to a {shape}'s draft.",
            ]
    return "\n".join(rows) + "\n"


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


if __name__ == "__main__":
    main()
