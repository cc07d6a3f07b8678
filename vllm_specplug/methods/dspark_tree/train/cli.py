# SPDX-License-Identifier: Apache-2.0
"""`specplug train dspark`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vllm_specplug.train import cli_common as common


@common.with_shared_options(compile=False)
def train(
    target: common.Target,
    features: common.Features,
    heldout: common.Heldout,
    out: common.Out,
    init_from: Annotated[
        str,
        typer.Option(
            help="Folder of a DSpark, DFlash or JetSpec head for this target to start from."
        ),
    ] = "",
    num_layers: Annotated[int, typer.Option(min=1, help="Draft layers; not with --init-from.")] = 2,
    intermediate_size: common.MlpWidth = 0,
    block_size: Annotated[
        int, typer.Option(min=2, help="Tokens drafted at once; the anchor's slot drafts too.")
    ] = 7,
    markov_rank: Annotated[
        int, typer.Option(min=1, help="Rank of the Markov head; published: 256.")
    ] = 64,
    confidence: Annotated[
        bool,
        typer.Option(
            "--confidence/--no-confidence",
            help="Train the confidence head too.",
        ),
    ] = True,
    draft_vocab_size: common.DraftVocabSize = 8192,
    vocab_from: common.VocabFrom = "",
    ce_weight: Annotated[
        float, typer.Option(min=0, help="Weight of the cross-entropy of the answer.")
    ] = 0.1,
    l1_weight: Annotated[
        float, typer.Option(min=0, help="Weight of the L1 distance to the target's distribution.")
    ] = 0.9,
    confidence_weight: Annotated[
        float, typer.Option(min=0, help="Weight of the confidence head's cross-entropy.")
    ] = 1.0,
    position_gamma: Annotated[
        float, typer.Option(min=0, help="Slot k has weight exp(-k/gamma); 0: equal weights.")
    ] = 4.0,
    anchors_per_step: common.BlocksPerStep = 640,
    anchor_stride: common.AnchorStride = 3,
    **shared: Any,
) -> None:
    """Trains a DSpark head: a block head with a Markov and a confidence head."""
    given: dict[str, Any] = {**locals(), **shared}
    from vllm_specplug.methods.dspark_tree.train.run import DSparkRun, train_dspark
    from vllm_specplug.methods.dspark_tree.train.trainer import DSparkRecipe
    from vllm_specplug.train.loop import LoopOptions

    common.run_training(train_dspark, given, DSparkRun, DSparkRecipe, LoopOptions)


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds the command."""
    train_app.command("dspark")(train)
