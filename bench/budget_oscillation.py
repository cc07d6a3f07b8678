# SPDX-License-Identifier: Apache-2.0
"""Load that swings across the point where drafts stop paying, for minutes.

Phases of one and of sixteen requests at once follow each other on an engine with `tree_budget`
"auto"; each set of prompts is served by plain vLLM as well, once. The budget must follow both ways,
every time: a phase whose throughput falls below `--least` x plain after the first cycle is a
collapse, and the exit status is 1.

    python bench/budget_oscillation.py --data PROMPTS [--minutes 3] [--least 0.9]

Times are CPU seconds of one thread, see turns.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from turns import LONGEST_PROMPT, PROMPTS, make_engine, run_load

LOADS = (1, 16)
PHASE_PROMPTS = {1: 3, 16: 24}
PROMPT_SETS = 3
NODES = 32


@dataclass(frozen=True)
class Phase:
    """One stretch of equal load."""

    load: int
    start_s: float
    """Seconds of drafting engine's work before it."""
    plain: float
    auto: float
    """Tokens per second."""
    nodes: float
    """Per draft."""

    @property
    def ratio(self) -> float:
        return self.auto / self.plain


def oscillate(args: argparse.Namespace) -> list[Phase]:
    """The phases in order, until the drafting engine has worked for `args.minutes`."""
    from vllm import SamplingParams

    from vllm_specplug.bench.prompts import chat_token_ids
    from vllm_specplug.targets import prepare_target

    target = str(prepare_target("smollm2"))
    prompts = chat_token_ids(target, args.data, PROMPTS, LONGEST_PROMPT)
    plain = make_engine(target, None)
    drafting = {"method": "jetspec", "model": args.head, "num_speculative_tokens": NODES}
    auto = make_engine(target, drafting)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    for name, llm in (("plain", plain), ("auto", auto)):
        run_load(llm, prompts[-6:], 2, params, f"warm-{name}")
    worked = 0.0
    references: dict[tuple[int, int], float] = {}
    phases: list[Phase] = []
    while worked < 60 * args.minutes:
        number = len(phases)
        load, prompt_set = LOADS[number % len(LOADS)], number // len(LOADS) % PROMPT_SETS
        first = 29 * prompt_set
        chosen = prompts[first : first + PHASE_PROMPTS[load]]
        if (load, prompt_set) not in references:
            result = run_load(plain, chosen, load, params, f"plain-{number}")
            references[load, prompt_set] = result["tokens_per_s"]
        result = run_load(auto, chosen, load, params, f"auto-{number}")
        phases.append(
            Phase(
                load,
                worked,
                references[load, prompt_set],
                result["tokens_per_s"],
                result["nodes"] / max(result["drafts"], 1.0),
            )
        )
        worked += result["seconds"]
        print(
            f"phase {number + 1}: {load} at once, plain {phases[-1].plain:.1f}, auto "
            f"{phases[-1].auto:.1f} tokens/s, {phases[-1].ratio:.2f} x",
            flush=True,
        )
    return phases


def write_report(phases: list[Phase], least: float, out: Path, command: str) -> bool:
    """budget_oscillation.md and .json; whether no settled phase fell below `least`."""
    from vllm_specplug.bench.provenance import one_line, provenance

    settled = phases[len(LOADS) :]
    holds = bool(settled) and min(phase.ratio for phase in settled) >= least
    record = {**provenance(), "command": command}
    unit = "CPU seconds of one thread"
    end = phases[-1].start_s
    lines = [
        "# The adaptive budget under a load that swings",
        "",
        f"{len(phases)} phases of one and of sixteen requests at once in turns, over {end:.0f} "
        f"{unit} of the drafting engine; SmolLM2-135M-Instruct in bfloat16, its JetSpec head, up "
        f"to {NODES} nodes a tree, greedy, 3 prompts of a quiet phase and 24 of a busy one. Tokens "
        "per second over those of plain vLLM for the same prompts.",
        "",
        "| cycle | " + " | ".join(f"{load} at once, over plain | nodes" for load in LOADS) + " |",
        "|" + " --- |" * (1 + 2 * len(LOADS)),
    ]
    for first in range(0, len(phases) - len(LOADS) + 1, len(LOADS)):
        cycle = phases[first : first + len(LOADS)]
        texts = " | ".join(f"{p.ratio:.2f} | {p.nodes:.1f}" for p in cycle)
        lines.append(f"| {first // len(LOADS) + 1} | {texts} |")
    verdict = "holds" if holds else "**missed**"
    lines += ["", f"- {verdict}: after the first cycle no phase below {least:g} x plain", ""]
    lines += [one_line(record)]
    (out / "budget_oscillation.md").write_text("\n".join(lines) + "\n")
    (out / "budget_oscillation.json").write_text(
        json.dumps(
            {"phases": [asdict(p) for p in phases], "holds": holds, "unit": unit,
             "command": command, "provenance": record},
            indent=1, default=str,
        )
    )  # fmt: skip
    print("\n".join(lines))
    return holds


def main() -> int:
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="of the drafting engine's work")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--least", type=float, default=0.9, help="lowest ratio to plain")
    parser.add_argument("--data", type=Path, required=True, help="folder of prompt files")
    parser.add_argument("--head", default=str(root / "heads" / "smollm2-135m-jetspec"))
    parser.add_argument("--out", type=Path, default=root / "bench" / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    phases = oscillate(args)
    command = f"python bench/budget_oscillation.py --data PROMPTS --minutes {args.minutes:g}"
    return int(not write_report(phases, args.least, args.out, command))


if __name__ == "__main__":
    sys.exit(main())
