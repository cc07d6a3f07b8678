# SPDX-License-Identifier: Apache-2.0
"""`specplug train tokenswift`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specplug.train import cli_common as common


def train(
    target: common.Target,
    features: Annotated[Path, typer.Option(help="Features that include the target's last layer.")],
    heldout: Annotated[Path, typer.Option(help="Held-out features, with the last layer too.")],
    out: common.Out,
    num_heads: Annotated[int, typer.Option(min=1, max=16, help="Chained heads.")] = 3,
    draft_vocab_size: Annotated[
        int, typer.Option(min=0, help="Most frequent answer tokens; 0: the whole vocabulary.")
    ] = 0,
    loss: Annotated[str, typer.Option(help="forward_kl, or sft as published.")] = "forward_kl",
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Positions a step.")] = 1024,
    optimizer: common.Optimizer = "muon",
    learning_rate: common.LearningRate = 3e-3,
    adam_learning_rate: common.AdamLearningRate = 1e-3,
    weight_decay: common.WeightDecay = 0.0,
    warmup_steps: common.WarmupSteps = 20,
    total_steps: common.TotalSteps = 1000,
    decay_share: common.DecayShare = 0.4,
    grad_clip: common.GradClip = 1.0,
    ema_decay: common.EmaDecay = 0.98,
    compile: common.Compile = True,
    eval_every: common.EvalEvery = 250,
    save_every: common.SaveEvery = 100,
    log_every: common.LogEvery = 25,
    eval_sequences: common.EvalSequences = 64,
    max_minutes: common.MaxMinutes = 0.0,
    resume: common.Resume = False,
    seed: common.Seed = 0,
) -> None:
    """Trains TokenSwift heads; the target stays frozen."""
    from vllm_specplug.train.loop import Rhythm
    from vllm_specplug.train.tokenswift import TokenSwiftRecipe
    from vllm_specplug.train.tokenswift_run import TokenSwiftRun, train_tokenswift

    given: dict[str, Any] = dict(locals())
    with common.friendly_errors():
        run = common.from_options(TokenSwiftRun, given)
        options = common.from_options(TokenSwiftRecipe, given)
        rhythm = common.from_options(Rhythm, given)
        common.train_with_progress(
            total_steps, lambda log, on_step: train_tokenswift(run, options, rhythm, log, on_step)
        )


def register(train_app: typer.Typer) -> None:
    """Adds the command."""
    train_app.command("tokenswift")(train)
