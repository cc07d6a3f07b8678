# SPDX-License-Identifier: Apache-2.0
"""TokenSwift, LongSpec and JetSpec beside plain decoding, over one long sampled output.

All write an output of `--tokens` tokens side by side (interleave.py). Trees sample with the
contextual penalty, which plain vLLM on a CPU does not have; a plain step costs the same for any
text.

    python bench/long_outputs.py --data PROMPTS --out FOLDER [--tokens 20000] [--segments 8]

FOLDER also gets the tokens of each output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from harness import BASELINE, HEADS, Benchmark, LoadProgress, make_engine
from interleave import TURN_SECONDS, Load, Serving, confine_process

from vllm_specplug.bench.result_page import ResultPage, Section

SYSTEMS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    **{
        method: {
            "method": method,
            "model": str(HEADS / f"smollm2-135m-{method}"),
            "num_speculative_tokens": 16,
        }
        for method in ("tokenswift", "longspec", "jetspec")
    },
}
PENALTY = {"specplug_penalty": 1.2, "specplug_penalty_window": 1024}
# The target was trained with 8,192 positions.
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_theta": 100000}  # fmt: skip


class Output:
    """One output of an engine, and the time that its parts took."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        # Per step: milliseconds of its draft; NaN for none
        self._draft_ms: list[float] = []

    def step(self) -> None:
        steps, drafts = len(self.serving.steps), len(self.serving.draft_ms)
        self.serving.step()
        if len(self.serving.steps) > steps:
            found = self.serving.draft_ms[drafts:]
            self._draft_ms.append(sum(found) if found else float("nan"))

    @property
    def num_tokens(self) -> int:
        return sum(made for _, made, _ in self.serving.steps)

    def segments(self, count: int, longest: int) -> list[dict[str, float]]:
        """Returns the figures of `count` equal parts: milliseconds per token ("ms"), tokens per
        step ("length"), and the median milliseconds of a draft ("draft_ms", NaN without any)."""
        tokens = np.array([made for _, made, _ in self.serving.steps])
        seconds = np.array([s for _, _, s in self.serving.steps])
        drafts = np.array(self._draft_ms)
        part = np.minimum(tokens.cumsum() * count // longest, count - 1)
        return [
            {
                "ms": 1e3 * seconds[part == i].sum() / tokens[part == i].sum(),
                "length": tokens[part == i].mean(),
                "draft_ms": float(np.nanmedian([np.nan, *drafts[part == i]])),
            }
            for i in range(count)
        ]


def table(parts: dict[str, list[dict[str, float]]], longest: int) -> Section:
    """Returns a row per segment."""
    systems = [system for system in parts if system != BASELINE]
    header = ["tokens up to", "plain, ms"]
    for system in systems:
        header += [f"{system}, ms", "over plain", "tokens per step", "draft, ms"]
    rows = []
    for i, plain in enumerate(parts[BASELINE]):
        row = [f"{(i + 1) * longest // len(parts[BASELINE]):,}", f"{plain['ms']:.1f}"]
        for system in systems:
            found = parts[system][i]
            row += [f"{found['ms']:.1f}", f"{plain['ms'] / found['ms']:.2f} x"]
            row += [f"{found['length']:.2f}", f"{found['draft_ms']:.1f}"]
        rows.append(row)
    return Section(tuple(header), rows)


def distinct(tokens: list[int]) -> list[float]:
    """Returns Distinct-1 to 4: the share of distinct n-grams among all n-grams of a text."""
    return [
        len(set(zip(*(tokens[i:] for i in range(n)), strict=False))) / (len(tokens) - n + 1)
        for n in range(1, 5)
    ]


def main() -> None:
    benchmark = Benchmark("long_outputs", __doc__)
    add = benchmark.parser.add_argument
    add("--data", type=Path, required=True, help="file or folder of prompts")
    add("--tokens", type=int, default=20000)
    add("--segments", type=int, default=8)
    add("--min-p", type=float, default=0.1, help="0.1 is the published setting of TokenSwift")
    args = benchmark.parse()
    confine_process()
    from lookups import chat_token_ids
    from rich.console import Console
    from vllm import SamplingParams

    from vllm_specplug.targets import prepare_target

    target = str(prepare_target("smollm2"))
    load = Load("one output", 0, chat_token_ids(target, args.data, 10, 500)[:1], 1)
    outputs: dict[str, Output] = {}
    for system, speculative in SYSTEMS.items():
        llm = make_engine(
            speculative, model=target, eager=args.eager, max_num_seqs=1,
            max_model_len=args.tokens + 1024,
            hf_overrides={"max_position_embeddings": 32768, "rope_parameters": ROPE},
        )  # fmt: skip
        params = SamplingParams(
            # `Serving` limits the first answer to half of `max_tokens`.
            temperature=1.0, min_p=args.min_p, seed=7, ignore_eos=True, detokenize=False,
            max_tokens=2 * args.tokens,
            extra_args=None if speculative is None else PENALTY,
        )  # fmt: skip
        outputs[system] = Output(Serving(llm, load, params, system))
    parts = 100
    with LoadProgress(Console(), parts, 0) as progress:
        while running := [out for out in outputs.values() if not out.serving.is_done]:
            # All outputs pass a length at about the same time, so noise affects all.
            output = min(running, key=lambda out: out.num_tokens)
            end = output.serving.seconds + TURN_SECONDS
            while output.serving.seconds < end and not output.serving.is_done:
                output.step()
            progress.advance(parts, parts * outputs[BASELINE].num_tokens // args.tokens)
    args.out.mkdir(parents=True, exist_ok=True)
    for system, output in outputs.items():
        np.save(args.out / f"{system}.npy", output.serving.answers[0])
    found = {name: output.segments(args.segments, args.tokens) for name, output in outputs.items()}
    benchmark.publish(
        args,
        ResultPage(
            name="long_outputs",
            title="Long outputs",
            about="SmolLM2-135M-Instruct in bfloat16, with YaRN for 32,768 positions (it was "
            f"trained with 8,192), one output at temperature 1 and min_p {args.min_p:g}. CPU "
            "milliseconds per token of one thread, in parts of the output; a draft's milliseconds "
            "are medians. The methods have their shipped heads, 16 nodes, their other defaults, "
            "and the contextual penalty (1.2 over 1,024 tokens). Plain decoding has no penalty. "
            "The systems' texts differ.",
            sections=[
                table(found, args.tokens),
                Section(
                    ("system", *(f"Distinct-{n}" for n in range(1, 5))),
                    [
                        (name, *(f"{share:.2f}" for share in distinct(out.serving.answers[0])))
                        for name, out in outputs.items()
                    ],
                ),
            ],
            data=[{"system": name, "segments": segments} for name, segments in found.items()],
            made_by=[benchmark.provenance(args)],
        ),
    )


if __name__ == "__main__":
    main()
