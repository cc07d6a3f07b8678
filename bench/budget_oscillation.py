# SPDX-License-Identifier: Apache-2.0
"""Load that swings across the point where drafts stop paying, for minutes.

Phases of one and of sixteen requests at once follow each other; every phase is run on plain vLLM
and on an engine with `tree_budget` "auto". The budget must follow both ways, every time: a phase
whose throughput falls below `--least` x plain after the first cycle is a collapse, and the exit
status is 1.

    python bench/budget_oscillation.py --data PROMPTS [--minutes 5] [--least 0.9]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from budget_goals import chat_prompts, make_engine, run_load

LOADS = (1, 16)
PHASE_PROMPTS = {1: 3, 16: 24}
NODES = 32


def oscillate(args: argparse.Namespace) -> list[tuple[int, float]]:
    """(concurrency, throughput over plain) of each phase, in order."""
    from vllm import SamplingParams

    from vllm_specplug.targets import prepare_target

    target = str(prepare_target("smollm2"))
    prompts = chat_prompts(target, args.data)
    plain = make_engine(target, None)
    drafting = {"method": "jetspec", "model": args.head, "num_speculative_tokens": NODES}
    auto = make_engine(target, drafting)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    for name, llm in (("plain", plain), ("auto", auto)):
        run_load(llm, prompts[-6:], 2, params, f"warm-{name}")
    deadline = time.perf_counter() + 60 * args.minutes
    phases: list[tuple[int, float]] = []
    while time.perf_counter() < deadline:
        number = len(phases)
        load = LOADS[number % len(LOADS)]
        count = PHASE_PROMPTS[load]
        first = 29 * (number // len(LOADS)) % (len(prompts) - count)
        chosen = prompts[first : first + count]
        speeds = [
            run_load(llm, chosen, load, params, f"{name}-{number}")["tokens_per_s"]
            for name, llm in (("plain", plain), ("auto", auto))
        ]
        phases.append((load, speeds[1] / speeds[0]))
        print(
            f"phase {number + 1}: {load} at once, plain {speeds[0]:.1f}, auto {speeds[1]:.1f} "
            f"tokens/s, {phases[-1][1]:.2f} x",
            flush=True,
        )
    return phases


def main() -> int:
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--least", type=float, default=0.9, help="lowest ratio to plain")
    parser.add_argument("--data", type=Path, required=True, help="folder of prompt files")
    parser.add_argument("--head", default=str(root / "heads" / "smollm2-135m-jetspec"))
    phases = oscillate(args := parser.parse_args())
    settled = phases[len(LOADS) :]
    for load in LOADS:
        ratios = [ratio for at, ratio in settled if at == load]
        if ratios:
            print(f"{load} at once: {min(ratios):.2f} to {max(ratios):.2f} x plain")
    return int(not settled or min(ratio for _, ratio in settled) < args.least)


if __name__ == "__main__":
    sys.exit(main())
