# SPDX-License-Identifier: Apache-2.0
"""`specplug data longspec-features` and `specplug train longspec`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specplug.methods.longspec.train.options import LongSpecRecipe, LongSpecRun
from vllm_specplug.methods.recipes import recipes_of
from vllm_specplug.options import check_target
from vllm_specplug.train import cli_common as common
from vllm_specplug.train.options import REPETITIVE_SHARE


def fixed_lengths(parts: Iterator[Sequence[int]], length: int) -> Iterator[list[int]]:
    """Yields token sequences joined and cut to exactly `length`, without an incomplete last one."""
    buffer: list[int] = []
    for part in parts:
        buffer += part
        while len(buffer) >= length:
            yield buffer[:length]
            del buffer[:length]


def features(
    target: common.Target,
    data: Annotated[Path, typer.Option(help="Folder made by `specplug data generate`.")],
    out: Annotated[Path, typer.Option(help="Training features; finished shards are kept.")],
    heldout: Annotated[
        Path | None, typer.Option(help="Held-out features, from greedy answers.")
    ] = None,
    length: Annotated[
        int,
        typer.Option(
            min=0,
            help="0: one sequence per answer, positions shifted. Otherwise answers and --text are "
            "joined and cut to this many tokens, for the long stages.",
        ),
    ] = 0,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files or folders to join, with --length.")
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=0, help="Maximum, of --length; 0: all.")] = 0,
    anchor_offsets: Annotated[
        bool, typer.Option(help="Shift the positions of short sequences.")
    ] = True,
    heldout_answers: Annotated[int, typer.Option(min=0)] = 64,
    tokens_per_batch: Annotated[int, typer.Option(min=1)] = 4096,
    seed: common.Seed = 0,
) -> None:
    """Runs the target once and stores its last layer's keys and values, as LongSpec reads them."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_specplug.methods.longspec.train.features import draw_offset, write_kv_shard
    from vllm_specplug.train.answers import finished_answers
    from vllm_specplug.train.features import TokenSequence

    with common.friendly_errors():
        if text and not length:
            raise ValueError(
                "--text needs --length, e.g. --length 4096; short stages train on answers only"
            )
        files = finished_answers(data)
        documents = common.text_files(text or [])
        aside = 0 if heldout is None else heldout_answers
        split = None if length else common.checked_split(files, aside, REPETITIVE_SHARE)
        check_target(str(target))
        common.length_limit(target, "--length", length)
        process = common.Process()
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.bfloat16, local_files_only=True
        )
        model = model.eval().to(process.device)
        most = model.config.max_position_embeddings

        def write(folder: Path, part: list[TokenSequence], salt: int) -> None:
            shifted = anchor_offsets and not length and folder.parent == out
            rng = np.random.default_rng([seed, salt])
            offsets = [draw_offset(len(s.tokens), most, rng) if shifted else (0, 0) for s in part]
            write_kv_shard(folder, part, offsets, model, tokens_per_batch=tokens_per_batch)

        if split is not None:
            common.write_split(split, out, heldout, write, process)
            return
        tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
        made = [
            TokenSequence(np.array(tokens, np.int64), 1, kind)
            for kind, tokens in _in_turn(
                _streams(files, documents, tokenizer, seed), length, max_sequences
            )
        ]
        with common.progress() as bar:
            task = bar.add_task("features", total=len(made))
            for number, start in enumerate(range(0, len(made), 16)):
                folder = out / f"shard-{length}-{number:05d}"
                if process.takes(number) and not (folder / "meta.json").is_file():
                    write(folder, made[start : start + 16], number)
                bar.update(task, completed=min(start + 16, len(made)))
        process.wait()


def _streams(
    files: Sequence[Path], documents: Sequence[Path], tokenizer: Any, seed: int
) -> dict[str, Iterator[Sequence[int]]]:
    """Returns the token ids of the answers in `files` and of shuffled documents, by kind."""
    from vllm_specplug.train import answers

    def conversations() -> Iterator[Sequence[int]]:
        for path in files:
            for answer in answers.read_answers(path):
                yield answer.prompt_ids + answer.answer_ids

    def texts() -> Iterator[Sequence[int]]:
        for path in random.Random(seed).sample(documents, len(documents)):
            yield tokenizer(path.read_text(encoding="utf-8", errors="ignore"))["input_ids"]

    return {"conversations": conversations(), "documents": texts()}


def _in_turn(
    streams: dict[str, Iterator[Sequence[int]]], length: int, most: int
) -> Iterator[tuple[str, list[int]]]:
    """Yields kinds and sequences of `length` tokens, at most `most` of them; 0 means all.

    Kinds alternate, so that a limit takes equally many of each.
    """
    left = {kind: iter(fixed_lengths(parts, length)) for kind, parts in streams.items()}
    count = 0
    while left:
        for kind in list(left):
            tokens = next(left[kind], None)
            if tokens is None:
                del left[kind]
                continue
            yield kind, tokens
            count += 1
            if count == most:
                return


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds both commands."""
    data_app.command("longspec-features")(features)
    summary = "Trains a LongSpec layer over the target's last-layer keys and values."
    start = "vllm_specplug.methods.longspec.train.run:start"
    common.add_training(
        train_app, "longspec", summary, start, LongSpecRun, LongSpecRecipe, recipes_of("longspec")
    )
