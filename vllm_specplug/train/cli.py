# SPDX-License-Identifier: Apache-2.0
"""`specplug data ...` and `specplug train ...`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from vllm_specplug.options import check_target
from vllm_specplug.registry import methods
from vllm_specplug.train import cli_common as common

data_app = typer.Typer(no_args_is_help=True, help="Make training data from the target.")
train_app = typer.Typer(no_args_is_help=True, help="Train draft heads.")
# Methods share commands: each module registers once.
for _module in dict.fromkeys(path for m in methods().values() for path in m.train_commands):
    importlib.import_module(_module).register(train_app, data_app)


def parse_counts(values: list[str]) -> dict[str, int]:
    """Returns 'kind=number' options as a mapping.

    Raises:
        ValueError: for anything else.
    """
    counts: dict[str, int] = {}
    for value in values:
        kind, _, number = value.partition("=")
        if not number.isdigit():
            raise ValueError(f"--make {value!r}, legal: KIND=NUMBER such as code=2000; correct it")
        counts[kind] = int(number)
    return counts


@data_app.command("generate")
def generate(
    target: Annotated[Path, typer.Option(help="Folder of the target model.")],
    out: Annotated[Path, typer.Option(help="Data folder; an unfinished one is continued.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL prompt files (rows with messages, turns, prompt or question)."),
    ] = None,
    make: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts to generate, KIND=NUMBER: topic, code, puzzle, translation, document, "
            "article_document, self."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Maximum tokens per answer.")] = 320,
    sampled_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of answers sampled instead of greedy.")
    ] = 0.3,
    temperatures: Annotated[str, typer.Option(help="Temperatures to sample with.")] = "0.7,1.0",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Answers decoded concurrently.")] = 128,
    shard_size: Annotated[int, typer.Option(min=1, help="Answers per file.")] = 512,
    eager: Annotated[
        bool, typer.Option(help="Skip compilation: starts faster, runs slower.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
) -> None:
    """Writes prompts, then has the target answer them with offline vLLM."""
    from vllm_specplug.train import answers
    from vllm_specplug.train.generate import VllmGenerator, make_prompts

    with common.friendly_errors():
        counts = parse_counts(make or [])
        planned = (out / answers.PLAN_NAME).is_file()
        if not planned and not counts and not prompts:
            raise ValueError("nothing to answer: give --prompts FILE or --make KIND=NUMBER")
        if planned and not answers.missing_shards(out, shard_size):
            typer.echo(f"all {len(answers.read_plan(out)):,} answers of the plan are in {out}")
            return
        check_target(str(target))
        heat = [float(t) for t in temperatures.split(",")]
        generator = VllmGenerator(
            target, max_tokens=max_tokens, max_num_seqs=max_num_seqs, eager=eager
        )
        if not planned:
            made = make_prompts(counts, prompts or [], seed, generator.texts)
            requests = answers.plan_requests(
                generator.render_all(made),
                temperatures=heat,
                sampled_share=sampled_share,
                seed=seed,
            )
            settings = {
                "target": str(target),
                "files": [str(p) for p in prompts or []],
                "make": counts,
                "max_tokens": max_tokens,
                "sampled_share": sampled_share,
                "temperatures": heat,
                "seed": seed,
            }
            answers.write_plan(out, requests, settings)
        tokens = 0
        with common.progress() as bar:
            task = bar.add_task("answers", total=len(answers.missing_shards(out, shard_size)))
            for new in answers.generate_missing(out, generator, shard_size):
                tokens += new
                bar.update(task, advance=1, description=f"answers, {tokens:,} new tokens")
        typer.echo(f"{tokens:,} new answer tokens in {out}")


@data_app.command("features")
def features(
    target: Annotated[Path, typer.Option(help="Folder of the target model.")],
    data: Annotated[Path, typer.Option(help="Folder made by `specplug data generate`.")],
    out: Annotated[Path, typer.Option(help="Training features; finished shards are kept.")],
    heldout: Annotated[Path, typer.Option(help="Held-out features, from greedy answers.")],
    layers: Annotated[
        str,
        typer.Option(
            help="Zero-based target layers whose outputs feed the head; default: spread over the "
            "depth, including the last layer."
        ),
    ] = "",
    heldout_answers: Annotated[
        int, typer.Option(min=1, help="Greedy answers kept for the acceptance estimate.")
    ] = 64,
    repetitive_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of answers ending in a loop that is kept.")
    ] = 0.7,
    tokens_per_batch: Annotated[int, typer.Option(min=64)] = 4096,
) -> None:
    """Runs the target once over its answers and stores the features for training."""
    import torch

    from vllm_specplug.train.features import TokenSequence, write_shard
    from vllm_specplug.train.target import decoder_of, load_target

    with common.friendly_errors():
        files = common.finished_answers(data)
        if not (target / "config.json").is_file():
            raise ValueError(f"target {str(target)!r} has no config.json; give a model folder")
        common.warn_of_split(files, heldout_answers, repetitive_share)
        model = load_target(target, torch.bfloat16)
        depth = len(decoder_of(model).layers)
        ids = [int(i) for i in layers.split(",")] if layers else spread_layers(depth)
        wrong = [i for i in ids if not 0 <= i < depth]
        if wrong:
            raise ValueError(f"--layers {wrong}, legal: 0..{depth - 1}; correct them")

        def write(folder: Path, part: list[TokenSequence], number: int) -> None:
            write_shard(folder, part, model, ids, tokens_per_batch=tokens_per_batch)

        common.write_split(files, heldout_answers, repetitive_share, out, heldout, write)


def spread_layers(num_target_layers: int, count: int = 4) -> list[int]:
    """Returns the default layers: a low one, then evenly up to and including the last."""
    last = num_target_layers - 1
    low = min(2, last)
    return sorted({round(low + i * (last - low) / (count - 1)) for i in range(count)})
