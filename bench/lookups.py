# SPDX-License-Identifier: Apache-2.0
"""N-gram trees beside plain decoding and vLLM's ngram, alone and on top of a head.

All engines are up in one process and answer the same prompts in turn, a batch at a time, so that
the machine's drift hits all alike. Greedy, answers end where they end.

    python bench/lookups.py --data PROMPTS [--batches 1 4 8] [--out bench/results]

On a machine that has other things to do, `--cpu-time` counts the CPU seconds of the one process
with one thread, for what is reported and for the budget's own measurements alike.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from vllm_specplug.bench.plan import VLLM_CONFIGS

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
CPU_TIME = "--cpu-time" in sys.argv
if CPU_TIME:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    time.perf_counter = time.process_time

ROOT = Path(__file__).resolve().parents[1]
JETSPEC = {
    "method": "jetspec",
    "model": str(ROOT / "heads" / "smollm2-135m-jetspec"),
    "num_speculative_tokens": 32,
}
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": VLLM_CONFIGS["ngram"],
    "ngram_tree": {"method": "ngram_tree"},
    "head": {**JETSPEC, "ngram_topk": 0},
    "head + n-grams": JETSPEC,
}


def make_engine(target: str, speculative: dict[str, Any] | None, batch: int) -> Any:
    from vllm import LLM

    return LLM(
        model=target,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        # A prompt met again must cost what it cost the first time.
        enable_prefix_caching=False,
        **({} if speculative is None else {"speculative_config": speculative}),
    )


def answer(llm: Any, prompts: list[list[int]], tokens: int, prefix: str) -> dict[str, Any]:
    """Answers prompts [B] all at once.

    Returns:
        Seconds from the first decoding step to the last, tokens made in them, tokens a running
        request and step, and the answers.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)
    for number, ids in enumerate(prompts):
        engine.add_request(f"{prefix}-{number}", {"prompt_token_ids": ids}, params)
    answers: dict[str, list[int]] = {}
    made = running = 0
    began = None
    last = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        last = time.perf_counter()
        before = sum(map(len, answers.values()))
        for output in outputs:
            answers[output.request_id] = list(output.outputs[0].token_ids)
        if began is None:
            # The prompts' own step, which every system has alike.
            if len(answers) == len(prompts):
                began = last
            continue
        made += sum(map(len, answers.values())) - before
        running += len(outputs)
    assert began is not None
    return {
        "seconds": last - began,
        "tokens": made,
        "per_step": made / max(running, 1),
        "answers": [answers[f"{prefix}-{n}"] for n in range(len(prompts))],
    }


def measure(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """One row per batch size and system: those so far, after every batch size."""
    from vllm_specplug.bench.prompts import chat_token_ids
    from vllm_specplug.targets import prepare_target

    target = str(prepare_target("smollm2"))
    prompts = chat_token_ids(target, args.data, 200, 500)
    # vLLM's ngram last: it imports numba, and with that no further engine starts on a CPU.
    names = sorted(SYSTEMS, key=lambda name: name == "ngram")
    made = {name: make_engine(target, SYSTEMS[name], max(args.batches)) for name in names}
    engines = {name: made[name] for name in SYSTEMS}
    for name, llm in engines.items():
        for batch in {1, max(args.batches)}:
            answer(llm, prompts[-batch:], 24, f"warm-{name}-{batch}")
    rows = []
    first = 0
    for batch in args.batches:
        seen: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        rounds = max(2, -(-args.prompts // batch))
        for number in range(rounds):
            group = prompts[first : first + batch]
            first += batch
            order = list(engines)
            shift = number % len(order)
            for name in order[shift:] + order[:shift]:
                seen[name].append(answer(engines[name], group, args.tokens, f"{batch}-{number}"))
        plain = seen["plain"]
        for name, results in seen.items():
            ratios = [
                (r["tokens"] / r["seconds"]) / (p["tokens"] / p["seconds"])
                for r, p in zip(results, plain, strict=True)
                if r["tokens"] and p["tokens"]
            ]
            same = sum(
                a == b
                for r, p in zip(results, plain, strict=True)
                for a, b in zip(r["answers"], p["answers"], strict=True)
            )
            rate = sum(r["tokens"] for r in results) / sum(r["seconds"] for r in results)
            base = sum(p["tokens"] for p in plain) / sum(p["seconds"] for p in plain)
            rows.append(
                {
                    "batch": batch,
                    "system": name,
                    "prompts": rounds * batch,
                    "tokens_per_s": rate,
                    "speed_up": rate / base,
                    "median_speed_up": median(ratios),
                    "slowest": min(ratios),
                    "per_step": sum(r["tokens"] for r in results)
                    / sum(r["tokens"] / r["per_step"] for r in results if r["tokens"]),
                    "same_answers": same,
                }
            )
        yield rows


def report(rows: list[dict[str, Any]], record: dict[str, Any], setting: str) -> str:
    from vllm_specplug.bench.provenance import one_line

    unit = "CPU second of one thread" if CPU_TIME else "second"
    lines = [
        "# Lookups beside plain decoding and vLLM's ngram",
        "",
        "SmolLM2-135M-Instruct in bfloat16, greedy, chat, code and maths prompts in turn, every "
        f"batch answered by all systems in turn in one process. Output tokens per {unit} of "
        "decoding, prompts excluded; the speed-up is that of all tokens over plain vLLM's, beside "
        "it the median over the batches and the slowest one. The head is the shipped JetSpec head "
        "under the adaptive budget, at most 32 nodes; `ngram_tree` has its defaults. Answers "
        "differ from plain decoding's where bfloat16 logits tie within rounding.",
        "",
        "| batch | system | tokens/s | speed-up | median, slowest batch | tokens a step | "
        "answers as plain's |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['batch']} | {r['system']} | {r['tokens_per_s']:.1f} | {r['speed_up']:.2f} x | "
            f"{r['median_speed_up']:.2f} x, {r['slowest']:.2f} x | {r['per_step']:.2f} | "
            f"{r['same_answers']} of {r['prompts']} |"
        )
    lines += ["", one_line(record) + (f"; {setting}" if setting else ""), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of prompt files")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompts", type=int, default=8, help="of each batch size, about")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds, not time")
    parser.add_argument("--setting", default="", help="words on the machine's state, for the page")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    from vllm_specplug.bench.provenance import provenance

    command = f"python bench/lookups.py --data PROMPTS --prompts {args.prompts}"
    command += f" --tokens {args.tokens}" + " --cpu-time" * args.cpu_time
    record = {**provenance(), "command": command}
    args.out.mkdir(parents=True, exist_ok=True)
    for rows in measure(args):
        text = report(rows, record, args.setting)
        name = "lookups_cpu" if CPU_TIME else "lookups"
        (args.out / f"{name}.md").write_text(text)
        (args.out / f"{name}.json").write_text(
            json.dumps({"rows": rows, "setting": args.setting, "provenance": record}, indent=1)
            + "\n"
        )
    print(text)


if __name__ == "__main__":
    main()
