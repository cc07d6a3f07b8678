# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM with the plugin installed and without it: the time of a decoding step.

    python bench/unused_plugin.py --rounds 8

There is an engine process for each side. They answer the same prompts of random tokens in turns, on
a random small target: steps are short there, so that what a step costs beside the model shows.
Without the plugin means `VLLM_PLUGINS` empty. Which side goes first alternates.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, Benchmark, make_engine
from sides import Round, Side, answer, in_turns, table

from vllm_specplug.bench.result_page import ResultPage, Section

SIDES = {"without": "", "installed": None}
BATCHES = (1, 16)
OUTPUT_LEN = 200


def serve(model: str, eager: bool) -> None:
    """A side's process: milliseconds per step of a batch, whenever they are asked for."""
    from vllm import SamplingParams

    llm = make_engine(
        model, None, eager=eager, dtype="float32", max_model_len=256, skip_tokenizer_init=True,
        max_num_seqs=max(BATCHES), seed=0,
    )  # fmt: skip
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False
    )
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(300) for _ in range(8)]} for _ in range(max(BATCHES))
    ]

    def measure(batch: int) -> float:
        start = time.perf_counter()
        llm.generate(prompts[:batch], params, use_tqdm=False)
        return 1000 * (time.perf_counter() - start) / OUTPUT_LEN

    answer(measure)


def start_side(side: str, model: str, eager: bool) -> Side:
    flags = ["--measure", model, *(["--eager"] if eager else [])]
    plugins = SIDES[side]
    return Side(__file__, flags, {} if plugins is None else {"VLLM_PLUGINS": plugins})


def page(rounds: list[Round], record: dict[str, Any]) -> ResultPage:
    """The page of these rounds."""
    lines = table(rounds, list(SIDES), BATCHES, 3)
    return ResultPage(
        name="unused_plugin",
        title="Plain vLLM with the plugin installed and unused",
        about=f"A process for each side, {len(rounds)} rounds in turns; milliseconds per decoding "
        "step of a random target of two layers: medians over the rounds, and of the rounds' "
        "ratios; in brackets the lowest and the highest.",
        sections=[Section(("batch", "without", "installed", "ratio"), lines)],
        data=rounds,
        made_by=[record],
    )


def main() -> None:
    benchmark = Benchmark("unused_plugin", __doc__)
    benchmark.parser.add_argument("--rounds", type=int, default=8)
    benchmark.parser.add_argument("--measure", metavar="MODEL", help="internal: one side")
    args = benchmark.parse()
    if args.measure:
        serve(args.measure, args.eager)
        return
    sys.path.insert(0, str(ROOT))
    from tests.e2e.tiny import make_target

    with tempfile.TemporaryDirectory() as folder:
        model = str(make_target(Path(folder) / "target", 340))
        rounds = in_turns(
            lambda side: start_side(side, model, args.eager), list(SIDES), BATCHES, args.rounds
        )
    benchmark.publish(args, page(rounds, benchmark.provenance(args)))


if __name__ == "__main__":
    main()
