# SPDX-License-Identifier: Apache-2.0
"""`specplug data ...` and `specplug train ...`."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_specplug.options import check_target
from vllm_specplug.registry import methods
from vllm_specplug.train import cli_common as common
from vllm_specplug.train.options import REPETITIVE_SHARE

if TYPE_CHECKING:
    from vllm_specplug.train.answers import Generate

# Plain help, because tables would cut the options' names in a narrow terminal.
_PLAIN: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,
}
data_app = typer.Typer(help="Make training data from the target.", **_PLAIN)
train_app = typer.Typer(help="Train draft heads.", **_PLAIN)
# Methods share commands: each module registers once.
for _module in dict.fromkeys(path for m in methods().values() for path in m.train_commands):
    importlib.import_module(_module).register(train_app, data_app)


def parse_temperatures(text: str) -> list[float]:
    """Returns the temperatures of an option.

    Raises:
        ValueError: for anything but numbers above 0.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(f"--temperatures {text!r}, legal: numbers > 0; correct them")
    return values


@data_app.command("generate")
def generate(
    target: Annotated[Path, typer.Option(help="Folder of the target model.")],
    out: Annotated[Path, typer.Option(help="Data folder; an unfinished one is continued.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompt files, JSONL or JSON: questions, conversations, or a server's logged "
            "requests. Answers in them are left out."
        ),
    ] = None,
    make: Annotated[
        int, typer.Option(min=0, help="Number of prompts that the target writes itself.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=8, help="Maximum tokens per answer.")] = 320,
    max_prompt_tokens: Annotated[
        int,
        typer.Option(min=0, help="Longer prompts are left out; 0: all that the target can read."),
    ] = 0,
    sampled_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of answers sampled instead of greedy.")
    ] = 0.3,
    temperatures: Annotated[str, typer.Option(help="Temperatures to sample with.")] = "0.7,1.0",
    chat_template_kwargs: common.TemplateKwargs = "",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Answers decoded concurrently.")] = 128,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Devices that share the target.")
    ] = 1,
    shard_size: common.ShardSize = 512,
    eager: Annotated[
        bool, typer.Option(help="Skip compilation: starts faster, runs slower.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
) -> None:
    """Writes prompts, then has the target answer them with offline vLLM."""
    from vllm_specplug.rows import LeftOut, RowFile
    from vllm_specplug.train import answers
    from vllm_specplug.train import generate as generation
    from vllm_specplug.train.chat import ChatTokenizer, parse_template_kwargs

    with common.friendly_errors():
        template, heat = (
            parse_template_kwargs(chat_template_kwargs),
            parse_temperatures(temperatures),
        )
        planned = (out / answers.PLAN_NAME).is_file()
        if not planned and not make and not prompts:
            raise ValueError("nothing to answer: give --prompts FILE or --make NUMBER")
        settings = {
            "target": str(target),
            "files": [str(p) for p in prompts or []],
            "num_made": make,
            "max_tokens": max_tokens,
            "sampled_share": sampled_share,
            "temperatures": heat,
            "chat_template_kwargs": template,
            "shard_size": shard_size,
            "seed": seed,
        }
        if planned:
            answers.refuse_other_settings(out, settings)
        if planned and not answers.missing_shards(out, shard_size):
            typer.echo(f"all {len(answers.read_plan(out)):,} answers of the plan are in {out}")
            return
        check_target(str(target))
        chat, left_out = ChatTokenizer.of(target, template), LeftOut()
        if make and not chat.has_template:
            raise ValueError(
                f"--make {make}, legal: 0, because the target has no chat template; leave it out"
            )
        limit = common.length_limit(target, "--max-prompt-tokens", max_prompt_tokens, max_tokens)
        settings["max_prompt_tokens"] = limit
        given: list[tuple[str, Sequence[int]]]
        if planned:
            answers.refuse_other_settings(out, settings)
            given = [(r.source, r.prompt_ids) for r in answers.read_plan(out)]
        else:
            rows = (row for path in prompts or [] for row in RowFile(path).conversations(left_out))
            given = list(generation.render_all(rows, chat, limit, left_out))
        longest = max((len(ids) for _, ids in given), default=0)
        if make:
            longest = max(longest, min(limit, generation.MADE_PROMPT_TOKENS))
        if not longest:
            common.report(left_out, out)
            raise ValueError("no prompt is left to answer; see the lines above")
        generator = generation.VllmGenerator(
            target,
            chat,
            max_prompt_tokens=longest,
            max_tokens=max_tokens,
            max_num_seqs=max_num_seqs,
            eager=eager,
            tensor_parallel_size=tensor_parallel_size,
        )
        if not planned:
            made = generator.user_turns(make, seed) if make else []
            if len(made) < make:
                typer.echo(
                    f"the target wrote {len(made):,} of {make:,} prompts; the others were too "
                    "short or too long",
                    err=True,
                )
            given += generation.render_all(made, chat, longest, left_out)
            requests = answers.plan_requests(
                given,
                temperatures=heat,
                sampled_share=sampled_share,
                seed=seed,
            )
            common.report(left_out, out)
            if len(requests) < len(given):
                typer.echo(f"{len(given) - len(requests):,} repeated prompts left out", err=True)
            answers.write_plan(out, requests, settings)
        _answer(out, generator, shard_size)


def _answer(out: Path, generate: Generate, shard_size: int) -> None:
    """Makes the shards of a plan that are missing; vLLM shows the progress of each."""
    from vllm_specplug.train import answers

    tokens, left = 0, len(answers.missing_shards(out, shard_size))
    for number, shard in enumerate(answers.generate_missing(out, generate, shard_size), 1):
        tokens += sum(len(answer.answer_ids) for answer in shard)
        typer.echo(f"{number:,} of {left:,} files of answers, {tokens:,} new tokens", err=True)
    typer.echo(f"{tokens:,} new answer tokens in {out}")


@data_app.command("import")
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(help="JSONL or JSON files of conversations or texts, or text files."),
    ],
    target: common.Target,
    out: Annotated[Path, typer.Option(help="Data folder, as of `specplug data generate`.")],
    max_length: Annotated[
        int,
        typer.Option(
            min=0, help="Most tokens of a prompt with its answer; 0: all that the target can read."
        ),
    ] = 0,
    chat_template_kwargs: common.TemplateKwargs = "",
    shard_size: common.ShardSize = 512,
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
) -> None:
    """Imports answers that you have, as the target's chat template renders them."""
    from vllm_specplug.train.answers import SETTINGS_NAME
    from vllm_specplug.train.chat import ChatTokenizer, parse_template_kwargs
    from vllm_specplug.train.imports import import_answers

    with common.friendly_errors():
        template = parse_template_kwargs(chat_template_kwargs)
        check_target(str(target))
        chat = ChatTokenizer.of(target, template)
        limit = common.length_limit(target, "--max-length", max_length)
        with common.progress() as bar:
            task = bar.add_task("rows", total=None)
            done = import_answers(
                files,
                out,
                chat,
                max_length=limit,
                shard_size=shard_size,
                seed=seed,
                on_row=lambda row, total: bar.update(task, completed=row, total=total),
            )
        settings = {
            "target": str(target),
            "files": [str(file) for file in files],
            "max_length": limit,
            "chat_template_kwargs": template,
            "seed": seed,
        }
        (out / SETTINGS_NAME).write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    common.report(done.left_out, out)
    typer.echo(
        f"{done.answers:,} answers of {done.rows:,} rows in {out}: {done.answer_tokens:,} tokens "
        f"after {done.prompt_tokens:,} of prompts"
    )


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
    ] = REPETITIVE_SHARE,
    tokens_per_batch: common.TokensPerBatch = 4096,
) -> None:
    """Runs the target once over its answers and stores the features for training."""
    from vllm_specplug.train.features import (
        TokenSequence,
        chosen_layers,
        shard_meta,
        write_shard,
    )
    from vllm_specplug.train.run import new_accelerator
    from vllm_specplug.train.target import TargetWeights

    with common.friendly_errors():
        weights = TargetWeights(target)
        ids = chosen_layers(layers, int(weights.config["num_hidden_layers"]))
        accelerator = new_accelerator()
        parts = common.read_split(data, heldout_answers, repetitive_share)
        model = weights.load_frozen(accelerator.device)

        def write(
            folder: Path, part: list[TokenSequence], number: int, on_batch: Callable[[int], None]
        ) -> None:
            write_shard(
                folder, part, model, ids, tokens_per_batch=tokens_per_batch, on_batch=on_batch
            )

        meta = shard_meta(model, ids)
        common.write_split(parts, out, heldout, write, accelerator, meta)
