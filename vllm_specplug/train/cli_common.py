# SPDX-License-Identifier: Apache-2.0
"""What the commands of `specplug data` and `specplug train` share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

Target = Annotated[Path, typer.Option(help="Folder of the target model.")]
Out = Annotated[Path, typer.Option(help="Run folder; the head is exported to OUT/head.")]
Features = Annotated[Path, typer.Option(help="Folder made by `specplug data features`.")]
Heldout = Annotated[Path, typer.Option(help="Held-out features, made with the same layers.")]
DraftVocabSize = Annotated[
    int, typer.Option(min=1, help="Most frequent answer tokens; not with --init-from.")
]
VocabFrom = Annotated[
    str, typer.Option(help="Folder of a head for this target whose draft vocabulary to use.")
]
MlpWidth = Annotated[
    int, typer.Option(min=0, help="MLP width; 0: the target's. Not with --init-from.")
]
Temperature = Annotated[float, typer.Option(help="Distillation temperature.")]
BlocksPerStep = Annotated[int, typer.Option(min=1, help="Blocks per step and process.")]
AnchorStride = Annotated[int, typer.Option(min=1, help="One anchor per this many tokens.")]

Seed = Annotated[int, typer.Option()]

# Options of every training and their usual defaults, in the order of the help.
_SHARED: dict[str, tuple[Any, Any]] = {
    "optimizer": (
        Annotated[str, typer.Option(help="muon (for matrices, AdamW for the rest) or adamw.")],
        "muon",
    ),
    "learning_rate": (Annotated[float, typer.Option(help="Learning rate of Muon.")], 3e-3),
    "adam_learning_rate": (Annotated[float, typer.Option(help="Learning rate of AdamW.")], 1e-3),
    "weight_decay": (Annotated[float, typer.Option(min=0)], 0.0),
    "warmup_steps": (Annotated[int, typer.Option(min=0)], 50),
    "total_steps": (
        Annotated[int, typer.Option(min=1, help="May be changed on --resume.")],
        2000,
    ),
    "decay_share": (
        Annotated[
            float, typer.Option(help="Final share of the steps, over which the rate falls to 0.")
        ],
        0.3,
    ),
    "grad_clip": (Annotated[float, typer.Option()], 1.0),
    "ema_decay": (Annotated[float, typer.Option(help="Weight averaging; 0: off.")], 0.995),
    "compile": (
        Annotated[bool, typer.Option(help="Fuse elementwise operations with torch.compile.")],
        True,
    ),
    "eval_every": (Annotated[int, typer.Option(min=1)], 250),
    "save_every": (Annotated[int, typer.Option(min=1)], 100),
    "log_every": (Annotated[int, typer.Option(min=1)], 25),
    "eval_sequences": (Annotated[int, typer.Option(min=1)], 64),
    "max_minutes": (
        Annotated[float, typer.Option(min=0, help="Save and stop after this time; 0: no limit.")],
        0.0,
    ),
    "resume": (
        Annotated[bool, typer.Option(help="Continue OUT exactly from where it was saved.")],
        False,
    ),
    "seed": (Seed, 0),
}


def with_shared_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options that every training has, last in its help.

    The command takes their values as `**shared`. `defaults` are those that differ from the usual.
    """
    assert defaults.keys() <= _SHARED.keys(), defaults.keys() - _SHARED.keys()

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        *own, shared = signature.parameters.values()
        assert shared.kind is shared.VAR_KEYWORD, shared
        own += [
            shared.replace(
                name=name,
                kind=shared.KEYWORD_ONLY,
                annotation=annotation,
                default=defaults.get(name, default),
            )
            for name, (annotation, default) in _SHARED.items()
        ]
        # Read by typer; Python calls the command by its own.
        command.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return command

    return decorate


@contextmanager
def friendly_errors() -> Iterator[None]:
    """A ValueError is the user's to correct: its message alone, exit code 2."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def progress(unit: str):
    """A progress bar counting `unit`."""
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


def from_options(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """A dataclass from command-line values of the same names; paths become strings."""
    values = {f.name: given[f.name] for f in fields(kind) if f.name in given}
    return kind(**{n: str(v) if isinstance(v, Path) else v for n, v in values.items()})


def train_with_progress(
    total_steps: int, train: Callable[[Callable[[str], None], Callable[..., None]], Any]
) -> None:
    """Calls `train(log, on_step)` under a progress bar."""
    with progress("steps") as bar:
        task = bar.add_task("training", total=total_steps)

        def on_step(step: int, numbers: dict[str, float]) -> None:
            bar.update(
                task,
                completed=step,
                description=(
                    f"loss {numbers['loss_average']:.3f}, {numbers['slots_per_second']:.0f} slots/s"
                ),
            )

        train(bar.console.print, on_step)


def run_training(train: Callable[..., Any], given: Mapping[str, Any], *kinds: type[Any]) -> None:
    """Calls `train(*parts, log, on_step)` under a progress bar, where a part is one of the
    dataclasses `kinds`, filled from the command-line values `given`."""
    with friendly_errors():
        parts = [from_options(kind, given) for kind in kinds]
        train_with_progress(given["total_steps"], lambda log, on_step: train(*parts, log, on_step))


def parse_number(kind: type[int] | type[float], name: str, text: str) -> Any:
    """A number from the command line; ValueError says which option it was."""
    try:
        return kind(text)
    except ValueError:
        words = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} = {text!r}, legal: {words}; correct it") from None
