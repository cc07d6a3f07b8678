# SPDX-License-Identifier: Apache-2.0
"""Acceptance of a draft head by the length of the context.

The same questions are asked after documents of several lengths, and answered greedily by an engine
with fixed tree sizes. A request's tokens per step are counted from its outputs.

    python bench/context_lengths.py --data PROMPTS [--head NAME] [--documents 3] [--questions 6]
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import HEADS, Benchmark, make_engine

from vllm_specplug.bench.evaluate import data_files
from vllm_specplug.bench.result_page import ResultPage, Section
from vllm_specplug.rows import LeftOut, RowFile

LENGTHS = (512, 1024, 2048, 4096, 8192)
# The last tokens of a context, which the answer fills.
ANSWER = 96
NODES = 16
SYSTEMS: dict[str, dict[str, Any]] = {
    f"{NODES} nodes": {"num_speculative_tokens": NODES, "tree_budget": NODES},
    "chain": {"num_speculative_tokens": 5, "tree_budget": 5, "tree_width": 1},
}
# Spec-Bench's tasks with long documents.
DOCUMENTS = ("summarization", "rag")
RESAMPLES = 4000

Steps = dict[tuple[int, int], list[int]]
"""Tokens of each step by context length and number of the question."""


def read_data(data: Path) -> tuple[list[str], list[str]]:
    """Returns texts of Spec-Bench's documents, and the questions of all sets in turn."""
    documents, sets, left_out = [], [], LeftOut()
    for path in data_files([data]):
        questions, rows = [], RowFile(path)
        for i, line in enumerate(path.read_text().splitlines()):
            row = json.loads(line)
            if row.get("category") in DOCUMENTS:
                documents.append(row["turns"][0])
            elif (found := rows.conversation(i, left_out)) is not None:
                questions.append(found.asked()[-1]["content"])
        random.Random(0).shuffle(questions)
        sets.append([question for question in questions if len(question) < 600])
    random.Random(0).shuffle(documents)
    return documents, list(itertools.chain.from_iterable(zip(*sets, strict=False)))


def make_prompts(
    target: str, data: Path, count: int, each: int
) -> dict[tuple[int, int], list[int]]:
    """Returns token ids by context length and number of the question: `each` questions after each
    of `count` texts of joined documents."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    documents, questions = read_data(data)
    mark = "DOCUMENTS"
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
    )
    before, after = (tokenizer(part).input_ids for part in template.split(mark))
    texts, longest = [], max(LENGTHS)
    for _ in range(count):
        text: list[int] = []
        while len(text) < longest:
            text += tokenizer(documents.pop() + "\n\n").input_ids
        texts.append(text)
    prompts = {}
    for number, question in enumerate(questions[: count * each]):
        end = [*tokenizer("\n\n" + question).input_ids, *after]
        for length in LENGTHS:
            # Drafts need places, too.
            space = length - ANSWER - NODES - len(before) - len(end)
            prompts[length, number] = [*before, *texts[number // each][:space], *end]
    return prompts


def serve(llm: Any, prompts: Mapping[tuple[int, int], list[int]], at_once: int) -> Steps:
    """Returns the tokens of each decoding step of all answers."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, detokenize=False)
    engine, steps = llm.llm_engine, {}
    # Equal beginnings follow each other, so that the engine's cache has them.
    waiting = sorted(prompts, key=lambda key: (key[1] // at_once, -key[0], key[1]), reverse=True)
    made: dict[str, int] = {}
    keys: dict[str, tuple[int, int]] = {}
    while waiting or made:
        while waiting and len(made) < at_once:
            key = waiting.pop()
            req_id = f"{key[0]}-{key[1]}"
            keys[req_id], made[req_id], steps[key] = key, 0, []
            engine.add_request(req_id, {"prompt_token_ids": prompts[key]}, params)
        for output in engine.step():
            req_id, total = output.request_id, len(output.outputs[0].token_ids)
            # The first token comes from the prompt.
            if made[req_id] and total > made[req_id]:
                steps[keys[req_id]].append(total - made[req_id])
            made[req_id] = total
            if output.finished:
                del made[req_id]
                if len(made) == 0:
                    print(f"{keys[req_id]} ended, {len(waiting)} left", flush=True)
    return steps


def interval(of: Sequence[Sequence[int]], over: Sequence[Sequence[int]] | None = None) -> str:
    """Returns the tokens per step of prompts, or their ratio to others on the same prompts, with
    the 95 % interval over prompts."""

    def rate(steps: Sequence[Sequence[int]], chosen: Any) -> Any:
        tokens = np.array([sum(prompt) for prompt in steps])[chosen].sum(-1)
        return tokens / np.array([len(prompt) for prompt in steps])[chosen].sum(-1)

    def value(chosen: Any) -> Any:
        return rate(of, chosen) / (1.0 if over is None else rate(over, chosen))

    draws = np.random.default_rng(0).integers(0, len(of), (RESAMPLES, len(of)))
    low, high = np.percentile(value(draws), (2.5, 97.5))
    return f"{value(np.arange(len(of))):.2f} ({low:.2f}, {high:.2f})"


def reaching(steps: Sequence[Sequence[int]], depths: int) -> list[str]:
    """Returns the share of steps that accept drafts to each depth or deeper."""
    accepted = np.concatenate([np.array(prompt) for prompt in steps]) - 1
    return [f"{(accepted >= depth).mean():.3f}" for depth in range(1, depths + 1)]


def sections(found: Mapping[str, Steps]) -> list[Section]:
    def at(name: str, length: int) -> list[list[int]]:
        # Answers of one token have no step.
        numbers = sorted(n for size, n in found[name] if size == length)
        used = [n for n in numbers if all(found[name][size, n] for size in LENGTHS)]
        return [found[name][length, n] for n in used]

    def table(of: Mapping[str, int], length: int) -> list[list[str]]:
        return [[f"{length:,}", name, *reaching(at(name, length), depths)]
                for name, depths in of.items()]  # fmt: skip

    header = ["context"]
    for name in found:
        header += [name, "over the shortest"]
    rows = []
    for length in LENGTHS:
        row = [f"{length:,}"]
        for name in found:
            steps = at(name, length)
            row += [interval(steps), interval(steps, at(name, LENGTHS[0]))]
        rows.append(row)
    depths = dict.fromkeys(found, 5)
    shares = [row for length in LENGTHS for row in table(depths, length)]
    return [
        Section(tuple(header), rows),
        Section(
            ("context", "", *(f"depth {depth}" for depth in range(1, 6))), shares, "By depth",
            ["Share of steps that accept drafts to this depth or deeper."],
        ),
    ]  # fmt: skip


def main() -> None:
    benchmark = Benchmark("longspec_contexts", __doc__, runs_vllm=False)
    add = benchmark.parser.add_argument
    add("--data", type=Path, required=True, help="folder of prompts")
    add("--head", type=Path, default=HEADS / "smollm2-135m-longspec")
    add("--documents", type=int, default=3, help="texts that questions follow")
    add("--questions", type=int, default=6, help="questions after each text")
    args = benchmark.parse()
    from vllm_specplug.targets import prepare_target

    target = str(prepare_target("smollm2"))
    prompts = make_prompts(target, args.data, args.documents, args.questions)
    found: dict[str, Steps] = {}
    for name, system in SYSTEMS.items():
        llm = make_engine(
            {"method": "longspec", "model": str(args.head), "ngram_topk": 0, **system},
            model=target, eager=True, max_num_seqs=args.questions,
            max_model_len=max(LENGTHS), max_num_batched_tokens=2048, enable_prefix_caching=True,
        )  # fmt: skip
        found[name] = serve(llm, prompts, args.questions)
        del llm
        # Also on the way, so that a run that is cut off leaves what it measured.
        benchmark.publish(args, make_page(found, args, benchmark.provenance(args)))


def make_page(found: Mapping[str, Steps], args: Any, record: Mapping[str, Any]) -> ResultPage:
    return ResultPage(
        name="longspec_contexts",
        title="LongSpec by the length of the context",
        about="SmolLM2-135M-Instruct in bfloat16 with the shipped LongSpec head (window 512), "
        f"without n-grams. {args.documents * args.questions} questions (chat, code and maths "
        f"in turn), {args.questions} after each of {args.documents} texts of joined documents "
        "of Spec-Bench's summarization and RAG tasks. A text is cut so that a greedy answer of "
        f"at most {ANSWER} tokens ends shortly before the length in the table; the target was "
        "trained with 8,192 positions. Tokens per step, counted in an engine; in brackets the "
        "95 % interval over questions (bootstrap). `over the shortest` compares answers to the "
        "same questions; the answers themselves differ by length.",
        sections=sections(found),
        data=[
            {"system": name, "context": key[0], "question": key[1], "tokens_of_steps": steps}
            for name, of in found.items()
            for key, steps in of.items()
        ],
        made_by=[record],
    )


if __name__ == "__main__":
    main()
