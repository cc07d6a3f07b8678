# SPDX-License-Identifier: Apache-2.0
"""The same trees on vLLM's V1 model runner and on V2, whose scheduler waits or works ahead.

    python bench/model_runners.py --rounds 6 [--data PROMPTS]

There is an engine process for each side. They answer the same prompts in turns; which goes first
alternates. The adaptive budget follows each side's own step costs. Speeds are of the wall clock:
working ahead uses time in which another thread computes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import HEADS, Benchmark, make_engine
from sides import Round, Side, answer, in_turns, table

from vllm_specplug.bench.result_page import ResultPage, Section

JETSPEC = {"method": "jetspec", "model": str(HEADS / "smollm2-135m-jetspec")}
# VLLM_USE_V2_MODEL_RUNNER and async_scheduling.
SIDES = {"V1": ("0", False), "V2": ("1", False), "V2 ahead": ("1", True)}
BATCHES = (1, 4, 8, 16)
OUTPUT_LEN = 200
QUESTIONS = (
    "Explain how tides work to a child.",
    "Write a Python function that merges two sorted lists.",
    "A shop sells 12 pens for 7 dollars each. What does Ann pay for half of them?",
    "Describe a lighthouse keeper's day.",
)


def make_prompts(target: str, data: Path | None) -> list[list[int]]:
    """Token ids of as many prompts as the largest batch has."""
    if data is not None:
        from vllm_specplug.bench.prompts import chat_token_ids

        found = chat_token_ids(target, data, 4 * max(BATCHES), 400)
    else:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(target)
        found = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in QUESTIONS
        ]
    return [found[i % len(found)] for i in range(max(BATCHES))]


def measured_batches(
    spec: dict[str, Any] | None, data: Path | None, eager: bool, *, async_scheduling: bool
) -> None:
    """A side's process: tokens per second of a batch, whenever they are asked for."""
    from vllm import SamplingParams

    from vllm_specplug.targets import prepare_target

    target = str(prepare_target("smollm2"))
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts(target, data)]
    llm = make_engine(
        target, spec, eager=eager, max_num_seqs=max(BATCHES), async_scheduling=async_scheduling
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False
    )

    def measure(batch: int) -> float:
        start = time.perf_counter()
        llm.generate(prompts[:batch], params, use_tqdm=False)
        return batch * OUTPUT_LEN / (time.perf_counter() - start)

    answer(measure)


def compare_batches(
    benchmark: Benchmark,
    sides: Sequence[str],
    rounds: int,
    uses_v2: Callable[[str], str],
    serve: Callable[[str, Path | None, bool], None],
    page: Callable[[list[Round], dict[str, Any]], ResultPage],
) -> None:
    """The command line of a comparison of sides by batch size: measures in turns and publishes, or
    is the process of one side.

    Args:
        rounds: unless the command line says otherwise.
        uses_v2: a side's VLLM_USE_V2_MODEL_RUNNER.
        serve: calls `measured_batches` for a side, its prompts and whether it is eager.
    """
    benchmark.parser.add_argument("--rounds", type=int, default=rounds)
    # Not required: there are prompts here.
    benchmark.parser.add_argument("--data", type=Path, default=Path(), help="prompts (JSONL)")
    benchmark.parser.add_argument("--measure", metavar="SIDE", help="internal: one side")
    args = benchmark.parse()
    data = None if args.data == Path() else args.data
    if args.measure:
        serve(args.measure, data, args.eager)
        return
    flags = [*(["--eager"] if args.eager else []), *([] if data is None else ["--data", str(data)])]

    def start(side: str) -> Side:
        env = {"VLLM_USE_V2_MODEL_RUNNER": uses_v2(side)}
        return Side(sys.argv[0], ["--measure", side, *flags], env)

    measured = in_turns(start, list(sides), BATCHES, args.rounds)
    benchmark.publish(args, page(measured, benchmark.provenance(args)))


def page(rounds: list[Round], record: dict[str, Any]) -> ResultPage:
    """The page of these rounds."""
    lines = table(rounds, list(SIDES), BATCHES, 1)
    header = ("batch", *SIDES, *(f"{side} over V1" for side in list(SIDES)[1:]))
    return ResultPage(
        name="model_runners",
        title="Trees on vLLM's model runners",
        about=f"A process for each side, {len(rounds)} rounds in turns; tokens per second of "
        "jetspec with its defaults on SmolLM2-135M-Instruct in bfloat16, greedy: medians over the "
        "rounds, and of the rounds' ratios; in brackets the lowest and the highest.",
        sections=[Section(header, lines)],
        data=rounds,
        made_by=[record],
    )


def serve(side: str, data: Path | None, eager: bool) -> None:
    measured_batches(JETSPEC, data, eager, async_scheduling=SIDES[side][1])


def main() -> None:
    benchmark = Benchmark("model_runners", __doc__)
    compare_batches(benchmark, list(SIDES), 6, lambda side: SIDES[side][0], serve, page)


if __name__ == "__main__":
    main()
