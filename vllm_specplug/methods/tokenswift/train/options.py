# SPDX-License-Identifier: Apache-2.0
"""`specplug train tokenswift`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from vllm_specplug.methods.recipes import recipes_of
from vllm_specplug.train.cli_common import add_training
from vllm_specplug.train.options import DistillationRecipe, RunOptions


@dataclass(frozen=True, kw_only=True)
class TokenSwiftRun(RunOptions):
    """Folders and shape of a run; published heads draft the whole vocabulary."""

    features: Annotated[
        Path | None, Option(help="Features that include the target's last layer.")
    ] = None
    num_heads: Annotated[int, Option(min=1, max=16, help="Number of chained heads.")] = 3
    draft_vocab_size: Annotated[
        int, Option(min=0, help="Most frequent answer tokens; 0: the whole vocabulary.")
    ] = 0


@dataclass(frozen=True, kw_only=True)
class TokenSwiftRecipe(DistillationRecipe):
    """Recipe of a run. Published: sft, AdamW at 5e-3, weight decay 0.1."""

    warmup_steps: int = 20
    total_steps: int = 1000
    decay_share: float = 0.4
    ema_decay: float = 0.98
    compile: bool = True
    tokens_per_step: Annotated[int, Option(min=1, help="Positions per step.")] = 1024


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds the command."""
    summary = "Trains TokenSwift heads; the target is frozen."
    add_training(
        train_app,
        "tokenswift",
        summary,
        TokenSwiftRun,
        TokenSwiftRecipe,
        recipes_of("tokenswift"),
    )
