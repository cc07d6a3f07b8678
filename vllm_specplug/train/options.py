# SPDX-License-Identifier: Apache-2.0
"""Options of every training. Their fields are options of the commands, so torch is not imported."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Option

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("linear", "cosine")
LOSSES = ("forward_kl", "sft")
STATE_NAME = "state.pt"
# Share of the answers ending in a loop that is kept. A small target also produces loops when it is
# served, so some are kept.
REPETITIVE_SHARE = 0.7


def _option(name: str) -> str:
    """Returns the command line's name of a field."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train a head, except its shape. A resumed run may change all but `optimizer`."""

    optimizer: Annotated[str, Option(help="muon (for matrices, AdamW for the rest) or adamw.")] = (
        "muon"
    )
    learning_rate: Annotated[float, Option(help="Learning rate of Muon.")] = 3e-3
    adam_learning_rate: Annotated[float, Option(help="Learning rate of AdamW.")] = 1e-3
    adam_beta2: Annotated[float, Option(min=0, max=1, help="Decay of AdamW's second moment.")] = (
        0.95
    )
    weight_decay: Annotated[float, Option(min=0, help="Weight decay of matrices.")] = 0.0
    schedule: Annotated[
        str,
        Option(
            help="linear: constant rate, then to 0 over --decay-share; cosine: to 0 from the "
            "warm-up on."
        ),
    ] = "linear"
    warmup_steps: Annotated[int, Option(min=0, help="Steps over which the rate rises.")] = 50
    total_steps: Annotated[int, Option(min=1, help="Steps; may be changed on --resume.")] = 2000
    gradient_accumulation: Annotated[
        int, Option(min=1, help="Batches per step; the sizes below are of one batch.")
    ] = 1
    decay_share: Annotated[
        float,
        Option(min=0, max=1, help="Final share of the steps, in which the rate falls to 0."),
    ] = 0.3
    grad_clip: Annotated[float, Option(help="Largest norm of the gradient.")] = 1.0
    ema_decay: Annotated[float, Option(min=0, max=1, help="Weight averaging; 0: off.")] = 0.995
    seed: Annotated[int, Option(help="Seed of weights, order and batches.")] = 0
    compile: Annotated[bool, Option(help="Fuse elementwise operations with torch.compile.")] = False

    def __post_init__(self) -> None:
        self.require_one_of("optimizer", OPTIMIZERS)
        self.require_one_of("schedule", SCHEDULES)
        self.require_positive("learning_rate", "adam_learning_rate", "grad_clip")

    def require_one_of(self, name: str, legal: Iterable[str]) -> None:
        """Raises ValueError unless the field is one of `legal`."""
        if getattr(self, name) not in legal:
            value = getattr(self, name)
            raise ValueError(
                f"{_option(name)} {value!r}, legal: {', '.join(legal)}; choose one of them"
            )

    def require_positive(self, *names: str) -> None:
        """Raises ValueError for a field that is not above 0."""
        for name in names:
            if not getattr(self, name) > 0:
                value = getattr(self, name)
                raise ValueError(f"{_option(name)} {value}, legal: a number > 0; correct it")

    def lr_scale(self, step: int) -> float:
        """Returns the learning rate's factor: warm-up, then the schedule.

        The constant part of the linear schedule does not depend on `total_steps`, so a run can be
        extended on resume.
        """
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if self.schedule == "cosine":
            length = max(1, self.total_steps - self.warmup_steps)
            done = min(1.0, max(0, step - self.warmup_steps) / length)
            return warm * 0.5 * (1.0 + math.cos(math.pi * done))
        decay_steps = max(1, round(self.total_steps * self.decay_share))
        left = (self.total_steps - step) / decay_steps
        return warm * min(1.0, max(0.0, left))


@dataclass(frozen=True, kw_only=True)
class DistillationRecipe(Recipe):
    """A recipe whose loss is `head_loss`."""

    loss: Annotated[str, Option(help="forward_kl, or sft: cross-entropy of the answer.")] = (
        "forward_kl"
    )
    temperature: Annotated[float, Option(help="Distillation temperature.")] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_of("loss", LOSSES)
        self.require_positive("temperature")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Folders of a run, and how often it logs, saves and evaluates, in steps. It reads features of
    the target, stored or computed beside the trainer."""

    shape_options: ClassVar[tuple[str, ...]] = ()
    """Options that shape a new head; a head to start from has its own values."""

    target: Annotated[Path, Option(help="Folder of the target model.")]
    out: Annotated[Path, Option(help="Run folder; the head is exported to OUT/head.")]
    features: Annotated[
        Path | None, Option(help="Stored features, made by `specplug data features`.")
    ] = None
    heldout: Annotated[
        Path | None, Option(help="Held-out features of the same kind and layers.")
    ] = None
    answers: Annotated[
        Path | None,
        Option(
            help="Instead of both: folder of answers. The target runs beside the trainer and its "
            "features are not stored."
        ),
    ] = None
    layers: Annotated[
        str, Option(help="With --answers: target layers, as in `specplug data features`.")
    ] = ""
    shard_target: Annotated[
        bool,
        Option(
            "--shard-target",
            help="With --answers and several processes: they share the target's layers (FSDP2), "
            "which takes less memory and more transfers.",
        ),
    ] = False
    heldout_answers: Annotated[
        int, Option(min=1, help="With --answers: greedy answers kept for the acceptance estimate.")
    ] = 64
    eval_every: Annotated[int, Option(min=1, help="Steps between evaluations and exports.")] = 250
    save_every: Annotated[int, Option(min=1, help="Steps between saves for --resume.")] = 100
    log_every: Annotated[int, Option(min=1, help="Steps between lines of the log.")] = 25
    eval_sequences: Annotated[
        int, Option(min=1, help="Held-out answers of an evaluation, evenly spread.")
    ] = 64
    max_minutes: Annotated[
        float, Option(min=0, help="Save and stop after this time; 0: no limit.")
    ] = 0.0
    resume: Annotated[bool, Option(help="Continue OUT exactly from where it was saved.")] = False
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Print steps per epoch, time, disk and memory of the run, and stop.",
        ),
    ] = False

    def __post_init__(self) -> None:
        stored = (self.features, self.heldout)
        if (None in stored) == (self.answers is None) or (self.answers and any(stored)):
            given = {"--features": self.features, "--heldout": self.heldout}
            names = [name for name, path in {**given, "--answers": self.answers}.items() if path]
            raise ValueError(
                f"{' and '.join(names) or 'no data'}, legal: --features with --heldout, or "
                "--answers; give one of the two"
            )
        if self.answers is None:
            legal = "only with --answers; stored features were made with theirs"
            self.refuse_given(("layers", "heldout_answers", "shard_target"), legal)

    def refuse_overwriting(self) -> None:
        """Raises ValueError if a new run would overwrite a saved one or its head."""
        state, head = self.out / STATE_NAME, self.out / "head"
        if not self.resume and state.is_file():
            raise ValueError(
                f"{state} exists; pass --resume to continue it, or name another output folder"
            )
        if not self.resume and head.exists():
            raise ValueError(
                f"{head} exists, without a state to resume; name another output folder, or remove "
                "that head"
            )

    def refuse_given(self, names: Iterable[str], legal: str) -> None:
        """Raises ValueError for a field that differs from its default."""
        for name in names:
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{_option(name)} {getattr(self, name)}, legal: {legal}, so leave it out"
                )


@dataclass(frozen=True, kw_only=True)
class NewHeadOptions(RunOptions):
    """A run that makes a head with the target's layer shape, or with weights, shape and draft
    vocabulary of the head in `init_from`."""

    shape_options: ClassVar[tuple[str, ...]] = (
        "draft_vocab_size", "vocab_from", "intermediate_size",
    )  # fmt: skip

    init_from: Annotated[
        str, Option(help="Folder of a head of this kind and target to start from.")
    ] = ""
    draft_vocab_size: Annotated[
        int, Option(min=1, help="Most frequent answer tokens; not with --init-from.")
    ] = 8192
    vocab_from: Annotated[
        str,
        Option(
            help="Folder of a head for this target whose draft vocabulary to use; not with "
            "--init-from."
        ),
    ] = ""
    intermediate_size: Annotated[
        int, Option(min=0, help="MLP width; 0: the target's. Not with --init-from.")
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_from:
            legal = "only without --init-from; a run keeps the shape of that head"
            self.refuse_given(self.shape_options, legal)
