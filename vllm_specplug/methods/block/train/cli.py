# SPDX-License-Identifier: Apache-2.0
"""`specplug train jetspec` and `specplug train dflash`: one command under two names."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vllm_specplug.train import cli_common as common

# What a method's name decides where an option is left out.
_METHODS: dict[str, dict[str, Any]] = {
    "jetspec": {"causal": True, "loss": "forward_kl"},
    "dflash": {"causal": False, "loss": "sft"},
}
SUMMARIES = {
    "jetspec": "Trains a JetSpec head: a block head whose slots see the earlier slots.",
    "dflash": "Trains a DFlash head: a block head whose slots see the whole block.",
}


@common.with_shared_options()
def train_block(
    context: typer.Context,
    target: common.Target,
    features: common.Features,
    heldout: common.Heldout,
    out: common.Out,
    init_from: Annotated[
        str,
        typer.Option(
            help="Folder of a block head to start from, with the same shape or fewer layers or a "
            "narrower MLP."
        ),
    ] = "",
    num_layers: Annotated[
        int, typer.Option(min=0, help="Draft layers; 0: 2, or those of --init-from.")
    ] = 0,
    intermediate_size: Annotated[
        int, typer.Option(min=0, help="MLP width; 0: the target's, or that of --init-from.")
    ] = 0,
    block_size: Annotated[
        int,
        typer.Option(min=0, help="Slots per block, with the anchor; 0: 8, or as in --init-from."),
    ] = 0,
    draft_vocab_size: Annotated[
        int,
        typer.Option(
            min=0, help="Most frequent answer tokens; 0: 8192, or the tokens of --init-from."
        ),
    ] = 0,
    loss: Annotated[
        str,
        typer.Option(
            help="forward_kl, reverse_kl, or sft: cross-entropy of the answer. Default: "
            "forward_kl for jetspec, sft for dflash."
        ),
    ] = "",
    temperature: common.Temperature = 1.0,
    position_gamma: Annotated[
        float | None,
        typer.Option(
            help="Slot j has weight exp(-(j-1)/gamma); 0: equal weights. Default: 4 for jetspec; "
            "for dflash by block size (8: 4, 10: 5, 16: 7).",
            show_default=False,
        ),
    ] = None,
    regression_weight: Annotated[
        float, typer.Option(min=0, help="Weight of a smooth-L1 loss to the final hidden state.")
    ] = 0.0,
    anchors_per_step: common.BlocksPerStep = 640,
    anchor_stride: common.AnchorStride = 3,
    short_block_size: Annotated[
        int,
        typer.Option(
            min=0, help="Train a share of the steps on blocks of this size; 0: none. jetspec only."
        ),
    ] = 0,
    short_block_share: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    **shared: Any,
) -> None:
    """`accelerate launch -m vllm_specplug.cli train jetspec ...` uses many devices."""
    given: dict[str, Any] = {**locals(), **shared}
    from vllm_specplug.methods.block.train.run import RunOptions, train_block_head
    from vllm_specplug.methods.block.train.trainer import TrainOptions

    method = _METHODS[str(context.info_name)]
    given.update(causal=method["causal"], loss=loss or method["loss"])
    common.run_training(train_block_head, given, RunOptions, TrainOptions)


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds both commands."""
    for name, summary in SUMMARIES.items():
        train_app.command(name, help=summary)(train_block)
