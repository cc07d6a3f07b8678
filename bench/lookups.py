# SPDX-License-Identifier: Apache-2.0
"""N-gram trees beside plain decoding and vLLM's ngram, alone and on top of a head.

All engines are up in one process and serve the same prompts side by side, in turns of a second on
CPU clocks of their own (turns.py), a fixed number of requests at once. What counts are the steps in
which that many are decoded and no prompt is taken in. Greedy, answers end where they end.

Every cell (round, requests at once, system) is written down at once, and a run that is started
again goes on where the last one stopped.

    python bench/lookups.py --data PROMPTS [--minutes 8] [--rounds 3] [--out bench/results]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from turns import (
    PROMPTS,
    Load,
    append_cells,
    make_engine,
    missing_loads,
    read_cells,
    run_load,
    serve_in_turns,
)

from vllm_specplug.bench.plan import VLLM_CONFIGS

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
LONGEST_PROMPT = 500


@dataclass(frozen=True)
class Cell:
    """What one system reached with so many requests at once in one round."""

    round: int
    concurrency: int
    system: str
    seconds: float
    """Of decoding."""
    tokens: int
    steps: int
    """Running requests summed over the steps."""
    same: int
    """Answers that are plain decoding's."""
    prompts: int
    commit: str | None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def measure(args: argparse.Namespace, cells_path: Path) -> None:
    """Runs the missing cells, for at most `args.minutes`."""
    from vllm import SamplingParams

    from vllm_specplug.bench.prompts import chat_token_ids
    from vllm_specplug.bench.provenance import commit
    from vllm_specplug.targets import prepare_target

    deadline = time.monotonic() + 60 * args.minutes
    todo = missing_loads(read_cells(cells_path, Cell), args.rounds, args.concurrency)
    if not todo:
        return
    target = str(prepare_target("smollm2"))
    prompts = chat_token_ids(target, args.data, PROMPTS, LONGEST_PROMPT)
    # vLLM's ngram last: it imports numba, and with that no further engine starts on a CPU.
    names = sorted(SYSTEMS, key=lambda name: name == "ngram")
    made = {name: make_engine(target, SYSTEMS[name], max(args.concurrency)) for name in names}
    engines = {name: made[name] for name in SYSTEMS}
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, detokenize=False)
    for name, llm in engines.items():
        run_load(llm, prompts[-6:], 2, params, f"warm-{name}")
    for round_, concurrency in todo:
        if time.monotonic() > deadline:
            print("out of time; run it again for the rest")
            return
        # A few more than are measured: the last ones run in smaller company.
        count = args.prompts + 4 * concurrency
        first = (round_ * len(args.concurrency) + args.concurrency.index(concurrency)) * 37
        chosen = prompts[first : first + count]
        loads = {
            name: Load(llm, chosen, concurrency, params, f"{round_}-{concurrency}")
            for name, llm in engines.items()
        }
        serve_in_turns(list(loads.values()))
        plain = loads["plain"].answers
        cells = [
            Cell(
                round=round_,
                concurrency=concurrency,
                system=name,
                seconds=load.decode_seconds,
                tokens=load.decode_tokens,
                steps=load.decode_steps,
                same=sum(load.answers[number] == answer for number, answer in plain.items()),
                prompts=len(chosen),
                commit=commit(),
            )
            for name, load in loads.items()
        ]
        append_cells(cells_path, cells)
        for cell in cells:
            print(
                f"round {round_}, {concurrency} at once, {cell.system:14s} {cell.rate:6.1f} "
                f"tokens/s, {cell.rate / cells[0].rate:.2f} x plain, "
                f"{cell.tokens / cell.steps:.2f} tokens a step",
                flush=True,
            )


def summarise(cells: list[Cell]) -> list[dict[str, Any]]:
    """One row per number of requests at once and system."""
    rows = []
    for concurrency in sorted({cell.concurrency for cell in cells}):
        of_system = {
            name: {c.round: c for c in cells if (c.concurrency, c.system) == (concurrency, name)}
            for name in SYSTEMS
        }
        for name, found in of_system.items():
            if not found:
                continue
            ratios = {
                other: [found[r].rate / of_system[other][r].rate for r in found]
                for other in ("plain", "ngram")
            }
            rows.append(
                {
                    "concurrency": concurrency,
                    "system": name,
                    "rounds": len(found),
                    "tokens_per_s": median(c.rate for c in found.values()),
                    "over_plain": median(ratios["plain"]),
                    "over_plain_range": [min(ratios["plain"]), max(ratios["plain"])],
                    "over_ngram": median(ratios["ngram"]),
                    "per_step": sum(c.tokens for c in found.values())
                    / sum(c.steps for c in found.values()),
                    "tokens": sum(c.tokens for c in found.values()),
                    "same": sum(c.same for c in found.values()),
                    "prompts": sum(c.prompts for c in found.values()),
                }
            )
    return rows


def report(rows: list[dict[str, Any]], record: dict[str, Any]) -> str:
    """The page."""
    from vllm_specplug.bench.provenance import one_line

    lines = [
        "# Lookups beside plain decoding and vLLM's ngram",
        "",
        "SmolLM2-135M-Instruct in bfloat16, greedy; chat, code and maths prompts in turn, "
        "served by all systems side by side in one process, in turns of a second. Output "
        "tokens per CPU second of one thread, over the steps in which that many requests were "
        "decoded and no prompt was taken in. Ratios are medians of the rounds' ratios, in "
        "brackets the lowest and the highest. The head is the shipped JetSpec head under the "
        "adaptive budget, at most 32 nodes; `ngram_tree` has its defaults; vLLM's `ngram` "
        "drafts 6 tokens after matches of 2 to 4. Answers differ from plain decoding's where "
        "bfloat16 logits tie within rounding.",
        "",
        "| at once | system | tokens/s | over plain | over `ngram` | tokens a step | tokens "
        "measured | answers as plain's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        low, high = r["over_plain_range"]
        lines.append(
            f"| {r['concurrency']} | {r['system']} | {r['tokens_per_s']:.1f} | "
            f"{r['over_plain']:.2f} x ({low:.2f} to {high:.2f}) | {r['over_ngram']:.2f} x | "
            f"{r['per_step']:.2f} | {r['tokens']} | {r['same']} of {r['prompts']} |"
        )
    return "\n".join([*lines, "", one_line(record), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of prompt files")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this long")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompts", type=int, default=4, help="of a round, and 4 x at once more")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    from vllm_specplug.bench.provenance import provenance

    command = f"python bench/lookups.py --data PROMPTS --rounds {args.rounds}"
    command += f" --prompts {args.prompts} --tokens {args.tokens}"
    args.out.mkdir(parents=True, exist_ok=True)
    cells_path = args.out / "lookups_cells.jsonl"
    measure(args, cells_path)
    rows = summarise(read_cells(cells_path, Cell))
    if rows:
        record = {**provenance(), "command": command}
        text = report(rows, record)
        (args.out / "lookups.md").write_text(text)
        (args.out / "lookups.json").write_text(
            json.dumps({"rows": rows, "provenance": record}, indent=1) + "\n"
        )
        print(text)


if __name__ == "__main__":
    main()
