# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM with the plugin installed and without it, in turns: the time of a decoding step.

    python bench/unused_plugin.py --rounds 4 --out bench/results/unused_plugin.md

Every round starts one engine process for each side, which answers the same prompts of random
tokens on a random small target: steps are short there, so that what a step costs beside the model
shows. Without the plugin means `VLLM_PLUGINS` empty.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_specplug.bench.provenance import one_line, provenance

SIDES = {"without": "", "installed": None}
BATCHES = (1, 16)
OUTPUT_LEN = 200
REPEATS = 5


def measure(model: str) -> dict[str, list[float]]:
    """Milliseconds a step by batch size, one value a repeat."""
    import random
    import time

    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=256, skip_tokenizer_init=True,
        max_num_seqs=max(BATCHES), enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False
    )
    rng = random.Random(0)
    times: dict[str, list[float]] = {}
    for batch in BATCHES:
        prompts = [
            {"prompt_token_ids": [rng.randrange(300) for _ in range(8)]} for _ in range(batch)
        ]
        for repeat in range(1 + REPEATS):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            # The first warms up.
            if repeat:
                milliseconds = 1000 * (time.perf_counter() - start) / OUTPUT_LEN
                times.setdefault(str(batch), []).append(milliseconds)
    return times


def run_side(side: str, model: str) -> dict[str, list[float]]:
    env = {
        **os.environ,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    plugins = SIDES[side]
    if plugins is not None:
        env["VLLM_PLUGINS"] = plugins
    command = [sys.executable, __file__, "--measure", model]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def page(rounds: list[dict[str, dict[str, list[float]]]]) -> str:
    """One line for each batch size: medians over all repeats, and the spread between rounds."""
    lines = [
        "# Plain vLLM with the plugin installed and unused",
        "",
        f"{one_line(provenance())}.",
        f"{len(rounds)} processes a side, in turns; milliseconds a decoding step of a random",
        "target of two layers: medians over all repeats, in brackets those of single processes.",
        "",
        "| batch | without | installed | ratio |",
        "|---|---|---|---|",
    ]
    for batch in map(str, BATCHES):
        cells, medians = [], []
        for side in SIDES:
            each = [statistics.median(r[side][batch]) for r in rounds]
            medians.append(statistics.median(t for r in rounds for t in r[side][batch]))
            cells.append(f"{medians[-1]:.3f} ({', '.join(f'{t:.3f}' for t in sorted(each))})")
        lines.append(f"| {batch} | {' | '.join(cells)} | {medians[1] / medians[0]:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--measure", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return 0
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.e2e.tiny import make_target

    with tempfile.TemporaryDirectory() as folder:
        model = str(make_target(Path(folder) / "target", 340))
        order = list(SIDES)
        rounds = []
        for number in range(arguments.rounds):
            # Whoever goes first changes.
            rounds.append({side: run_side(side, model) for side in order[:: 1 - 2 * (number % 2)]})
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    text = page(rounds)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
