# SPDX-License-Identifier: Apache-2.0
"""`specplug train eagle3`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer
from typer import Option

from vllm_specplug.methods.recipes import recipes_of
from vllm_specplug.train.cli_common import add_training
from vllm_specplug.train.options import DistillationRecipe, NewHeadOptions


@dataclass(frozen=True, kw_only=True)
class Eagle3Run(NewHeadOptions):
    """Folders and shape of a run."""

    shape_options: ClassVar[tuple[str, ...]] = (*NewHeadOptions.shape_options, "norm_output")
    save_lm_head: Annotated[
        bool,
        Option(
            "--lm-head/--no-lm-head",
            help="Write the LM head too. vLLM's own method needs it; the plugin takes the target's "
            "rows where it is missing.",
        ),
    ] = True
    speculators: Annotated[
        bool,
        Option(
            "--speculators",
            help="Write the head in the format of the library speculators, with the tables that it "
            "needs.",
        ),
    ] = False
    norm_output: Annotated[
        bool,
        Option(
            "--norm-output",
            help="EAGLE-3.1: feed states back after the final norm, not before; not with "
            "--init-from.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Eagle3Recipe(DistillationRecipe):
    """Recipe of a run; forward_kl is the published loss."""

    steps: Annotated[
        int, Option(min=1, help="Tokens drafted in a row from each anchor in training.")
    ] = 5
    step_decay: Annotated[
        float, Option(help="Weight of each of them relative to the one before.")
    ] = 0.8
    anchors_per_step: Annotated[int, Option(min=1, help="Anchors per step and process.")] = 512
    anchors_per_sequence: Annotated[int, Option(min=1, help="Maximum anchors of an answer.")] = 96

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("step_decay")


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds the command."""
    summary = "Trains an EAGLE-3 head by training-time test; vLLM's own method reads it too."
    add_training(train_app, "eagle3", summary, Eagle3Run, Eagle3Recipe, recipes_of("eagle3"))
