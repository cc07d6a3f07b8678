# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM with the plugin installed and without it: the time of a decoding step.

    python bench/unused_plugin.py --rounds 4

Every round starts one engine process for each side, which answers the same prompts of random
tokens on a random small target: steps are short there, so that what a step costs beside the model
shows. Without the plugin means `VLLM_PLUGINS` empty. Sides go first by turns.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from harness import ROOT, Benchmark, make_engine

from vllm_specplug.bench.result_page import ResultPage, Section

SIDES = {"without": "", "installed": None}
BATCHES = (1, 16)
OUTPUT_LEN = 200
REPEATS = 5


def measure(model: str, eager: bool) -> dict[str, list[float]]:
    """Milliseconds per step by batch size, one value for each repeat."""
    from vllm import SamplingParams

    llm = make_engine(
        model, None, eager=eager, dtype="float32", max_model_len=256, skip_tokenizer_init=True,
        max_num_seqs=max(BATCHES), seed=0,
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


def run_side(side: str, model: str, eager: bool) -> dict[str, list[float]]:
    """`measure` in a process of its own."""
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    plugins = SIDES[side]
    if plugins is not None:
        env["VLLM_PLUGINS"] = plugins
    command = [sys.executable, __file__, "--measure", model, "--allow-changes"]
    command += ["--eager"] if eager else []
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def page(rounds: list[dict[str, dict[str, list[float]]]], record: dict[str, Any]) -> ResultPage:
    """One line for each batch size: medians over all repeats, and the spread between rounds."""
    table = []
    for batch in map(str, BATCHES):
        cells, medians = [], []
        for side in SIDES:
            each = sorted(median(r[side][batch]) for r in rounds)
            medians.append(median(t for r in rounds for t in r[side][batch]))
            cells.append(f"{medians[-1]:.3f} ({', '.join(f'{t:.3f}' for t in each)})")
        table.append([batch, *cells, f"{medians[1] / medians[0]:.3f}"])
    return ResultPage(
        name="unused_plugin",
        title="Plain vLLM with the plugin installed and unused",
        about=f"{len(rounds)} processes for each side, in alternating order; milliseconds per "
        "decoding step of a random target of two layers: medians over all repeats, in brackets "
        "those of single processes.",
        sections=[Section(("batch", "without", "installed", "ratio"), table)],
        data=rounds,
        made_by=[record],
    )


def main() -> None:
    benchmark = Benchmark("unused_plugin", __doc__)
    benchmark.parser.add_argument("--rounds", type=int, default=4)
    benchmark.parser.add_argument("--measure", metavar="MODEL", help="internal: one side")
    args = benchmark.parse()
    if args.measure:
        print(json.dumps(measure(args.measure, args.eager)))
        return
    sys.path.insert(0, str(ROOT))
    from tests.e2e.tiny import make_target

    with tempfile.TemporaryDirectory() as folder:
        model = str(make_target(Path(folder) / "target", 340))
        order = list(SIDES)
        rounds = []
        for number in range(args.rounds):
            turn = order[:: 1 - 2 * (number % 2)]
            rounds.append({side: run_side(side, model, args.eager) for side in turn})
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    benchmark.publish(args, page(rounds, benchmark.provenance(args)))


if __name__ == "__main__":
    main()
