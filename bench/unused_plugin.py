# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM with the plugin installed and without it: the time of a decoding step.

    python bench/unused_plugin.py --rounds 4

Every round starts one engine process for each side, which answers the same prompts of random
tokens on a random small target: steps are short there, so that what a step costs beside the model
shows. Without the plugin means `VLLM_PLUGINS` empty. Sides go first by turns.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, Benchmark, make_engine
from sides import in_turns, measured_in_process, table

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
    flags = ["--measure", model, *(["--eager"] if eager else [])]
    plugins = SIDES[side]
    return measured_in_process(
        __file__, flags, {} if plugins is None else {"VLLM_PLUGINS": plugins}
    )


def page(rounds: list[dict[str, dict[str, list[float]]]], record: dict[str, Any]) -> ResultPage:
    """The page of these rounds."""
    lines = table(rounds, list(SIDES), BATCHES, 3)
    return ResultPage(
        name="unused_plugin",
        title="Plain vLLM with the plugin installed and unused",
        about=f"{len(rounds)} processes for each side, in alternating order; milliseconds per "
        "decoding step of a random target of two layers: medians over all repeats, in brackets "
        "those of single processes.",
        sections=[Section(("batch", "without", "installed", "ratio"), lines)],
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
        rounds = in_turns(list(SIDES), args.rounds, lambda side: run_side(side, model, args.eager))
    benchmark.publish(args, page(rounds, benchmark.provenance(args)))


if __name__ == "__main__":
    main()
