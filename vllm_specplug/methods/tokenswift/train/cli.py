# SPDX-License-Identifier: Apache-2.0
"""`specplug train tokenswift`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specplug.train import cli_common as common


@common.with_shared_options(warmup_steps=20, total_steps=1000, decay_share=0.4, ema_decay=0.98)
def train(
    target: common.Target,
    features: Annotated[Path, typer.Option(help="Features that include the target's last layer.")],
    heldout: Annotated[Path, typer.Option(help="Held-out features that include the last layer.")],
    out: common.Out,
    num_heads: Annotated[int, typer.Option(min=1, max=16, help="Number of chained heads.")] = 3,
    draft_vocab_size: Annotated[
        int, typer.Option(min=0, help="Most frequent answer tokens; 0: the whole vocabulary.")
    ] = 0,
    loss: Annotated[str, typer.Option(help="forward_kl, or sft as published.")] = "forward_kl",
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Positions per step.")] = 1024,
    **shared: Any,
) -> None:
    """Trains TokenSwift heads; the target stays frozen."""
    given: dict[str, Any] = {**locals(), **shared}
    from vllm_specplug.methods.tokenswift.train.run import TokenSwiftRun, train_tokenswift
    from vllm_specplug.methods.tokenswift.train.trainer import TokenSwiftRecipe
    from vllm_specplug.train.loop import LoopOptions

    common.run_training(train_tokenswift, given, TokenSwiftRun, TokenSwiftRecipe, LoopOptions)


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds the command."""
    train_app.command("tokenswift")(train)
