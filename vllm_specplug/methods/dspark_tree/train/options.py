# SPDX-License-Identifier: Apache-2.0
"""`specplug train dspark`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer import Option

from vllm_specplug.methods.block.train.options import REMOVED, AnchorRecipe, AnyBlockRun, MaskToken
from vllm_specplug.methods.recipes import recipes_of
from vllm_specplug.train.cli_common import add_training


@dataclass(frozen=True, kw_only=True)
class DSparkRun(AnyBlockRun):
    """Folders and shape of a run. A head of another kind in `init_from` gives the block only."""

    init_from: Annotated[
        str,
        Option(help="Folder of a DSpark, DFlash or JetSpec head for this target to start from."),
    ] = ""
    block_size: Annotated[
        int, Option(min=2, help="Tokens drafted at once; the anchor's slot drafts too.")
    ] = 7
    markov_rank: Annotated[
        int,
        Option(
            min=1,
            help="Rank of the Markov head; published: 256. A DSpark head in --init-from keeps "
            "its own.",
        ),
    ] = 64
    mask_token_id: MaskToken = None
    confidence: Annotated[
        bool,
        Option("--confidence/--no-confidence", help="Train the confidence head too."),
    ] = True


@dataclass(frozen=True, kw_only=True)
class DSparkRecipe(AnchorRecipe):
    """Weights of the three losses, and of slot k relative to the first. The defaults are the
    published ones."""

    ce_weight: Annotated[
        float, Option(min=0, help="Weight of the cross-entropy of the answer.")
    ] = 0.1
    l1_weight: Annotated[
        float, Option(min=0, help="Weight of the L1 distance to the target's distribution.")
    ] = 0.9
    confidence_weight: Annotated[
        float, Option(min=0, help="Weight of the confidence head's cross-entropy.")
    ] = 1.0
    position_gamma: Annotated[
        float, Option(min=0, help="Slot k has weight exp(-k/gamma); 0: equal weights.")
    ] = 4.0


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds the command."""
    summary = "Trains a DSpark head: a block head with a Markov and a confidence head."
    add_training(
        train_app, "dspark", summary, DSparkRun, DSparkRecipe, recipes_of("dspark"), REMOVED
    )
