# SPDX-License-Identifier: Apache-2.0
"""`specplug data ...` and `specplug train ...`."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

data_app = typer.Typer(no_args_is_help=True, help="Training data made by the target itself.")
train_app = typer.Typer(no_args_is_help=True, help="Training of draft heads.")


@contextmanager
def _friendly_errors():  # type: ignore[no-untyped-def]
    """A ValueError is the user's to correct: its message alone, exit code 2."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _progress(unit: str):  # type: ignore[no-untyped-def]
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )


def parse_counts(values: list[str]) -> dict[str, int]:
    """'kind=number' options as a mapping; raises ValueError for anything else."""
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
        typer.Option(help="JSONL prompt files (messages, turns, prompt or question a row)."),
    ] = None,
    make: Annotated[
        list[str] | None,
        typer.Option(
            help="Self-made prompts, KIND=NUMBER: topic, code, puzzle, translation, document, "
            "article_document, self."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest answer, tokens.")] = 320,
    sampled_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of answers sampled instead of greedy.")
    ] = 0.3,
    temperatures: Annotated[str, typer.Option(help="Temperatures to sample with.")] = "0.7,1.0",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Answers decoded at once.")] = 128,
    shard_size: Annotated[int, typer.Option(min=1, help="Answers a file.")] = 512,
    eager: Annotated[
        bool, typer.Option(help="Skip compilation: starts sooner, runs slower.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = 0,
) -> None:
    """Writes prompts, then lets the target answer them with offline vLLM."""
    from vllm_specplug.train import answers
    from vllm_specplug.train.generate import VllmGenerator, make_prompts

    with _friendly_errors():
        counts = parse_counts(make or [])
        planned = (out / answers.PLAN_NAME).is_file()
        if not planned and not counts and not prompts:
            raise ValueError("nothing to answer: give --prompts FILE or --make KIND=NUMBER")
        heat = [float(t) for t in temperatures.split(",")]
        generator = VllmGenerator(
            target,
            max_tokens=max_tokens,
            max_num_seqs=max_num_seqs,
            llm_options={"enforce_eager": eager},
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
        with _progress("files") as bar:
            task = bar.add_task("answers", total=None)
            tokens = 0

            def on_shard(shard: int, shards: int, new_tokens: int) -> None:
                nonlocal tokens
                tokens += new_tokens
                bar.update(
                    task,
                    total=shards,
                    completed=shard + 1,
                    description=f"answers, {tokens:,} new tokens",
                )

            total = answers.generate_missing(
                out, generator, shard_size=shard_size, on_shard=on_shard
            )
        typer.echo(f"{total:,} new answer tokens in {out}")


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
            "depth, the last layer included."
        ),
    ] = "",
    heldout_answers: Annotated[
        int, typer.Option(min=1, help="Greedy answers kept for the acceptance estimate.")
    ] = 64,
    repetitive_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share kept of answers that end in a loop.")
    ] = 0.7,
    tokens_per_batch: Annotated[int, typer.Option(min=64)] = 4096,
) -> None:
    """Runs the target once over its answers and stores what training reads."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_specplug.train import answers
    from vllm_specplug.train.features import TokenSequence, write_shard

    with _friendly_errors():
        files = answers.answer_shards(data)
        if not files:
            raise ValueError(
                f"{data} holds no finished answers; run `specplug data generate` first"
            )
        if not (target / "config.json").is_file():
            raise ValueError(f"target {str(target)!r} has no config.json; give a model folder")
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.bfloat16, local_files_only=True
        ).eval()
        depth = model.config.num_hidden_layers
        ids = [int(i) for i in layers.split(",")] if layers else spread_layers(depth)
        wrong = [i for i in ids if not 0 <= i < depth]
        if wrong:
            raise ValueError(f"--layers {wrong}, legal: 0..{depth - 1}; correct them")

        def sequence(answer: answers.Answer) -> TokenSequence:
            tokens = np.array(answer.prompt_ids + answer.answer_ids, np.int64)
            return TokenSequence(tokens, len(answer.prompt_ids), answer.source)

        with _progress("files") as bar:
            task = bar.add_task("features", total=len(files))
            kept_out = 0
            for number, path in enumerate(files):
                rng = random.Random(number)
                kept = [
                    a
                    for a in answers.read_answers(path)
                    if answers.keep_answer(a, rng, repetitive_share)
                ]
                # Held-out answers come from the first files, so that growing data never moves one.
                aside = [a for a in kept if a.temperature == 0][: heldout_answers - kept_out]
                kept_out += len(aside)
                name = path.stem.replace("answers", "shard")
                for folder, part in (
                    (heldout / name, aside),
                    (out / name, [a for a in kept if a not in aside]),
                ):
                    if part and not (folder / "meta.json").is_file():
                        write_shard(
                            folder,
                            [sequence(a) for a in part],
                            model,
                            ids,
                            tokens_per_batch=tokens_per_batch,
                        )
                bar.update(task, completed=number + 1)


def spread_layers(num_target_layers: int, count: int = 4) -> list[int]:
    """Default layers: a low one, then evenly up to and including the last."""
    last = num_target_layers - 1
    low = min(2, last)
    return sorted({round(low + i * (last - low) / (count - 1)) for i in range(count)})


@train_app.command("jetspec")
def jetspec(
    target: Annotated[Path, typer.Option(help="Folder of the target model.")],
    features: Annotated[Path, typer.Option(help="Folder made by `specplug data features`.")],
    heldout: Annotated[Path, typer.Option(help="Held-out features, made with the same layers.")],
    out: Annotated[Path, typer.Option(help="Run folder; the head is exported to OUT/head.")],
    num_layers: Annotated[int, typer.Option(min=1, help="Draft layers.")] = 2,
    intermediate_size: Annotated[int, typer.Option(min=0, help="MLP width; 0: the target's.")] = 0,
    block_size: Annotated[int, typer.Option(min=2, help="Slots a block, anchor included.")] = 8,
    draft_vocab_size: Annotated[
        int, typer.Option(min=1, help="Most frequent answer tokens.")
    ] = 8192,
    causal: Annotated[bool, typer.Option(help="Causal mask inside a block (JetSpec).")] = True,
    loss: Annotated[str, typer.Option(help="forward_kl, reverse_kl or sft.")] = "forward_kl",
    temperature: Annotated[float, typer.Option(help="Distillation temperature.")] = 1.0,
    position_gamma: Annotated[
        float, typer.Option(help="Slot j weighs exp(-(j-1)/gamma); 0: equal weights.")
    ] = 4.0,
    regression_weight: Annotated[
        float, typer.Option(min=0, help="Smooth-L1 to the target's final hidden state.")
    ] = 0.0,
    optimizer: Annotated[
        str, typer.Option(help="muon (matrices; AdamW for the rest) or adamw.")
    ] = "muon",
    learning_rate: Annotated[float, typer.Option(help="Of Muon.")] = 3e-3,
    adam_learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(min=0)] = 0.0,
    warmup_steps: Annotated[int, typer.Option(min=0)] = 50,
    total_steps: Annotated[
        int, typer.Option(min=1, help="May be raised or lowered on --resume.")
    ] = 2000,
    decay_share: Annotated[
        float, typer.Option(help="Last share of the steps, over which the rate falls to 0.")
    ] = 0.3,
    grad_clip: Annotated[float, typer.Option()] = 1.0,
    ema_decay: Annotated[float, typer.Option(help="Weight averaging; 0: off.")] = 0.995,
    anchors_per_step: Annotated[int, typer.Option(min=1, help="Blocks a step and process.")] = 640,
    anchor_stride: Annotated[int, typer.Option(min=1, help="One anchor in so many tokens.")] = 3,
    short_block_size: Annotated[
        int, typer.Option(min=0, help="A share of the steps trains blocks of this size; 0: none.")
    ] = 0,
    short_block_share: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    compile: Annotated[bool, typer.Option(help="Fuse elementwise work with torch.compile.")] = True,
    eval_every: Annotated[int, typer.Option(min=1)] = 250,
    save_every: Annotated[int, typer.Option(min=1)] = 100,
    log_every: Annotated[int, typer.Option(min=1)] = 25,
    eval_sequences: Annotated[int, typer.Option(min=1)] = 64,
    max_minutes: Annotated[
        float, typer.Option(min=0, help="Save and stop after so long; 0: no limit.")
    ] = 0.0,
    resume: Annotated[bool, typer.Option(help="Continue OUT exactly where it was saved.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Trains a JetSpec head. `accelerate launch -m vllm_specplug.cli train jetspec ...` uses many
    devices."""
    from vllm_specplug.train.jetspec import TrainOptions
    from vllm_specplug.train.run import RunOptions, train_jetspec

    given: dict[str, Any] = dict(locals())
    with _friendly_errors():
        options = TrainOptions(**{f.name: given[f.name] for f in fields(TrainOptions)})
        run = RunOptions(
            **{
                f.name: str(given[f.name]) if isinstance(given[f.name], Path) else given[f.name]
                for f in fields(RunOptions)
            }
        )
        with _progress("steps") as bar:
            task = bar.add_task("training", total=total_steps)

            def on_step(step: int, numbers: dict[str, float]) -> None:
                bar.update(
                    task,
                    completed=step,
                    description=(
                        f"loss {numbers['loss_average']:.3f}, "
                        f"{numbers['slots_per_second']:.0f} slots/s"
                    ),
                )

            train_jetspec(run, options, bar.console.print, on_step)


@train_app.command("evaluate")
def evaluate(
    target: Annotated[Path, typer.Option(help="Folder of the target model.")],
    head: Annotated[Path, typer.Option(help="Folder of a draft head.")],
    features: Annotated[
        Path, typer.Option(help="Features of greedy answers, made with the head's layers.")
    ],
    budgets: Annotated[str, typer.Option(help="Tree sizes in nodes, root excluded.")] = "8,16,32",
    builders: Annotated[str, typer.Option(help="Tree builders.")] = "best_first,accum_logp",
    tree_width: Annotated[int, typer.Option(min=1, help="Candidates a depth.")] = 7,
) -> None:
    """Mean acceptance length of a head by data set, estimated from cached features."""
    import torch

    from vllm_specplug.models.checkpoint import load_block_head
    from vllm_specplug.train.evaluate import evaluate_head
    from vllm_specplug.train.features import FeatureStore
    from vllm_specplug.train.target import TargetWeights

    with _friendly_errors():
        weights = TargetWeights(target)
        tables = weights.tables()
        module, extras = load_block_head(head, weights.config, dtype=torch.bfloat16)
        store = FeatureStore(features)
        if store.target_layer_ids != module.config.target_layer_ids:
            raise ValueError(
                f"--features hold target layers {list(store.target_layer_ids)}, legal: those of "
                f"the head, {list(module.config.target_layer_ids)}; make them with --layers"
            )
        if extras.mask_from_embedding:
            module.mask_embedding.copy_(tables.embed_tokens[module.config.mask_token_id])
        ids = extras.target_ids(module.config.draft_vocab_size)
        rows = tables.lm_head[ids] if extras.lm_head is None else extras.lm_head
        embed = tables.embed_tokens if extras.embed_tokens is None else extras.embed_tokens
        report = evaluate_head(
            module,
            (store[i] for i in range(len(store))),
            embed.to(torch.bfloat16),
            rows.to(torch.bfloat16),
            ids,
            budgets=[int(b) for b in budgets.split(",")],
            builders=builders.split(","),
            width=tree_width,
        )
    policies = list(report.total)
    lines = [["data", *policies], ["all", *(f"{v:.2f}" for v in report.lengths().values())]]
    for source, lengths in report.lengths_by_source().items():
        lines.append([source, *(f"{lengths[p]:.2f}" for p in policies)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
    typer.echo("rank-1 accuracy by slot: " + " ".join(f"{v:.2f}" for v in report.slot_accuracy()))
