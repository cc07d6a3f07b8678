# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the commands of `specplug data` and `specplug train`."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer
from safetensors import SafetensorError
from typer.core import TyperCommand

from vllm_specplug.progress import is_main_process, progress
from vllm_specplug.train.options import Recipe, RunOptions

if TYPE_CHECKING:
    from accelerate import Accelerator

    from vllm_specplug.rows import LeftOut
    from vllm_specplug.train.features import TokenSequence

Parts = list[tuple[str, "list[TokenSequence]", "list[TokenSequence]"]]
LEFT_OUT_NAME = "left_out.json"
Target = Annotated[Path, typer.Option(help="Folder of the target model.")]
TokensPerBatch = Annotated[
    int, typer.Option(min=64, help="Tokens that the target reads at once, with padding.")
]
ShardSize = Annotated[int, typer.Option(min=1, help="Answers per file.")]
TemplateKwargs = Annotated[
    str,
    typer.Option(
        help="JSON object of arguments for the chat template, as the requests to be served have "
        "them."
    ),
]


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turns a ValueError into its message and exit code 2, and a file error into code 1."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except (OSError, SafetensorError) as error:
        typer.echo(f"error: {error}; check the command's paths and their disks", err=True)
        raise typer.Exit(1) from None


def report(left_out: LeftOut, folder: Path) -> None:
    """Prints what was left out, and writes all places into a file in `folder`."""
    for line in left_out.lines():
        typer.echo(f"left out or changed: {line}", err=True)
    if left_out.places:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LEFT_OUT_NAME
        path.write_text(json.dumps(left_out.places, indent=1) + "\n", "utf-8")
        typer.echo(f"all places: {path}", err=True)


def length_limit(target: Path, option: str, wanted: int, max_tokens: int = 0) -> int:
    """Returns the maximum tokens of a sequence: the option's value `wanted`, or for 0 the target's
    context less answers of `max_tokens`.

    Raises:
        ValueError: if `wanted` or `max_tokens` is too large; the message names the option.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config()
    context = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
    most = context - max_tokens
    if most < 1:
        raise ValueError(
            f"--max-tokens {max_tokens}, legal: up to {context - 1}, because the target's context "
            f"of {context} tokens also holds the prompt; lower it"
        )
    if not 0 <= wanted <= most:
        beside = f" beside --max-tokens {max_tokens}" if max_tokens else ""
        raise ValueError(f"{option} {wanted}, legal: 0..{most} for this target{beside}; lower it")
    return wanted or most


def read_split(data: Path, heldout_answers: int, repetitive_share: float) -> Parts:
    """Returns a split of answers; the main process prints what a user should know about it."""
    from vllm_specplug.train import features

    parts, remarks = features.read_split(data, heldout_answers, repetitive_share)
    for line in remarks:
        if is_main_process():
            typer.echo(line, err=True)
    return parts


def write_split(
    parts: Parts,
    out: Path,
    heldout: Path | None,
    write: Callable[[Path, list[TokenSequence], int, Callable[[int], None]], None],
    accelerator: Accelerator,
    meta: Mapping[str, Any],
) -> None:
    """Writes shards of each file of answers to `out` and `heldout`, and keeps finished ones. Each
    process handles a share of the files.

    Args:
        write: called with the folder of a shard, its sequences, the number of its file, and a
            function to call with the number of tokens after each batch.
        meta: what the shards' metadata will hold, with `aux_size` and `hidden_size`.

    Raises:
        ValueError: if the features do not fit on the disk, or a finished shard is of other answers,
            layers or another target.
    """
    from vllm_specplug.train.features import check_shard

    missing: list[tuple[Path, list[TokenSequence], int]] = []
    own, finished = 0, 0
    for number, (name, aside, rest) in enumerate(parts):
        is_own = number % accelerator.num_processes == accelerator.process_index
        for folder, sequences in ((heldout, aside), (out, rest)):
            if folder is None or not sequences:
                continue
            own += is_own * _num_tokens(sequences)
            if (folder / name / "meta.json").is_file():
                check_shard(folder / name, sequences, meta)
                finished += is_own * _num_tokens(sequences)
            else:
                missing.append((folder / name, sequences, number))
    tokens = sum(_num_tokens(sequences) for _, sequences, _ in missing)
    _check_disk(out, tokens * 2 * (meta["aux_size"] + meta["hidden_size"]))
    # No shard may be finished while another process looks for missing ones.
    accelerator.wait_for_everyone()
    with progress() as bar:
        task = bar.add_task("tokens", completed=finished, total=own)
        for folder, sequences, number in missing:
            if number % accelerator.num_processes == accelerator.process_index:
                write(folder, sequences, number, partial(bar.advance, task))
    accelerator.wait_for_everyone()


def _num_tokens(sequences: Sequence[TokenSequence]) -> int:
    return sum(len(sequence.tokens) for sequence in sequences)


def _check_disk(out: Path, size: int) -> None:
    """Prints the bytes that the new features take.

    Raises:
        ValueError: if the disk does not hold them.
    """
    out.mkdir(parents=True, exist_ok=True)
    # An interrupted shard is replaced.
    replaced = sum(path.stat().st_size for path in out.glob("*.partial/*"))
    free = shutil.disk_usage(out).free + replaced
    told = f"new features take {size / 1e9:.2f} GB, the disk of {out} has {free / 1e9:.2f} GB free"
    if size > free:
        raise ValueError(
            f"{told}; use another disk, fewer --layers or fewer answers, or train with --answers, "
            "which stores none"
        )
    if is_main_process():
        typer.echo(told, err=True)


def add_training(
    app: typer.Typer,
    name: str,
    summary: str,
    run: type[RunOptions],
    recipe: type[Recipe],
    recipes: Mapping[str, Mapping[str, Any]],
    removed: Mapping[str, str] | None = None,
    **decided: Any,
) -> None:
    """Adds a command that trains a head with `train.run.train_head` under a progress bar.

    Args:
        run, recipe: their fields with an `Option` are the command's options: required ones first,
            then the method's own, then the shared ones. The run.py beside their module has the
            function `start`; the command imports it when it runs.
        recipes: options that `--recipe` sets unless they are on the command line.
        removed: options that the command had, and what to do without them.
        decided: values of the other fields.
    """
    kinds: tuple[type[Any], ...] = (run, recipe)
    package = run.__module__.rpartition(".")[0]

    def command(context: typer.Context, recipe: str, **given: Any) -> None:
        with friendly_errors(), progress() as bar:
            typed = {name for name in given if _is_typed(context, name)}
            kept = typed | set(run.shape_options if given.get("init_from") else ())
            named = recipe_options(recipe, recipes, given, kept)
            epochs = named.pop("epochs", None)
            chosen = {**given, **named, **decided}
            chosen_run, chosen_recipe = (
                kind(**{f.name: chosen[f.name] for f in fields(kind)}) for kind in kinds
            )
            # This imports torch, so options are checked first.
            from vllm_specplug.train.run import train_head

            shown = not chosen["dry_run"]
            task = bar.add_task("training", total=chosen["total_steps"], visible=shown)

            def on_step(step: int, numbers: dict[str, float]) -> None:
                loss, speed = numbers["loss_average"], numbers["slots_per_second"]
                described = f"loss {loss:.3f}, {speed:.0f} slots/s"
                bar.update(task, completed=step, description=described)

            if epochs and "total_steps" not in typed and is_main_process():
                bar.console.print(
                    f"recipe {recipe} trains for {epochs} epochs; --dry-run prints the steps of an "
                    f"epoch, and this run has --total-steps {chosen['total_steps']}"
                )
            method = importlib.import_module(f"{package}.run")
            train_head(method.start, chosen_run, chosen_recipe, bar.console.print, on_step)

    shared = {f.name for kind in (RunOptions, Recipe) for f in fields(kind)}
    options = [option for kind in kinds for option in _options(kind)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options.append(inspect.Parameter("context", keyword, annotation=typer.Context))
    options.append(
        inspect.Parameter(
            "recipe",
            keyword,
            default="",
            annotation=Annotated[
                str,
                typer.Option(
                    help=f"Published values: {', '.join(recipes)}. Other options override them."
                ),
            ],
        )
    )
    options.sort(key=lambda p: (p.default is not p.empty, p.name in shared))
    # typer reads the signature.
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    app.command(name, cls=_refusing(removed or {}), help=summary)(command)


def _refusing(removed: Mapping[str, str]) -> type[TyperCommand]:
    """Returns a command that refuses options with what to do without them."""

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            for option in (arg.partition("=")[0] for arg in args):
                if option in removed:
                    raise typer.BadParameter(f"{option} was removed; {removed[option]}", ctx)
            return super().parse_args(ctx, args)

    return Command


def recipe_options(
    name: str,
    recipes: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Any],
    kept: Set[str],
) -> dict[str, Any]:
    """Returns the options that a recipe sets; "" names no recipe.

    Args:
        given: all options of the command.
        kept: options that a recipe does not change, because the command line or the head to start
            from sets them.

    Raises:
        ValueError: for an unknown recipe.
    """
    if name and name not in recipes:
        raise ValueError(f"--recipe {name!r}, legal: {', '.join(recipes)}; choose one of them")
    values = {key: value for key, value in recipes.get(name, {}).items() if key not in kept}
    share = values.pop("warmup_share", None)
    if share is not None and "warmup_steps" not in kept:
        values["warmup_steps"] = round(share * values.get("total_steps", given["total_steps"]))
    return values


def _is_typed(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _options(kind: type[Any]) -> Iterator[inspect.Parameter]:
    """Yields the options of a dataclass. A subclass may override a default without repeating the
    option."""
    hints: dict[str, Any] = {}
    annotated: Any = Annotated
    for base in reversed(kind.__mro__):
        own = inspect.get_annotations(base, eval_str=True)
        hints.update((n, hint) for n, hint in own.items() if get_origin(hint) is annotated)
    for field in fields(kind):
        if field.name in hints:
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
