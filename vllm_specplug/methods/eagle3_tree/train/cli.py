# SPDX-License-Identifier: Apache-2.0
"""`specplug train eagle3`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specplug.train import cli_common as common


@common.with_shared_options(compile=False, eval_sequences=24)
def train(
    target: common.Target,
    features: Annotated[
        Path,
        typer.Option(help="Folder made by `specplug data features`, with the head's layers."),
    ],
    heldout: common.Heldout,
    out: common.Out,
    init_from: Annotated[
        str, typer.Option(help="Folder of an EAGLE-3 head for this target to start from.")
    ] = "",
    draft_vocab_size: common.DraftVocabSize = 8192,
    vocab_from: common.VocabFrom = "",
    save_lm_head: Annotated[
        bool,
        typer.Option(
            "--lm-head/--no-lm-head",
            help="Write the LM head too. vLLM's own method needs it; the plugin takes the target's "
            "rows where it is missing.",
        ),
    ] = True,
    intermediate_size: common.MlpWidth = 0,
    norm_output: Annotated[
        bool,
        typer.Option(
            "--norm-output", help="EAGLE-3.1: feed states back after the final norm, not before."
        ),
    ] = False,
    loss: Annotated[
        str, typer.Option(help="forward_kl (as published), reverse_kl, or sft: cross-entropy.")
    ] = "forward_kl",
    temperature: common.Temperature = 1.0,
    steps: Annotated[
        int, typer.Option(min=1, help="Tokens drafted in a row from each anchor in training.")
    ] = 5,
    step_decay: Annotated[
        float, typer.Option(help="Weight of each of them relative to the one before.")
    ] = 0.8,
    anchors_per_step: Annotated[int, typer.Option(min=1)] = 512,
    anchors_per_sequence: Annotated[int, typer.Option(min=1)] = 96,
    **shared: Any,
) -> None:
    """Trains an EAGLE-3 head by training-time test; vLLM's own method reads it too."""
    given: dict[str, Any] = {**locals(), **shared}
    from vllm_specplug.methods.eagle3_tree.train.run import Eagle3Run, train_eagle3
    from vllm_specplug.methods.eagle3_tree.train.trainer import Eagle3Recipe
    from vllm_specplug.train.loop import LoopOptions

    common.run_training(train_eagle3, given, Eagle3Run, Eagle3Recipe, LoopOptions)


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds the command."""
    train_app.command("eagle3")(train)
