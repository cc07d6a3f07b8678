# SPDX-License-Identifier: Apache-2.0
"""`specplug train jetspec` and `specplug train dflash`: one trainer under two names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer
from typer import Option

from vllm_specplug.methods.recipes import recipes_of
from vllm_specplug.train.cli_common import add_training
from vllm_specplug.train.options import DistillationRecipe, NewHeadOptions, Recipe

MaskToken = Annotated[
    int | None,
    Option(
        min=0,
        help="Token whose embedding the masked slots read, one not in any text. The head is then "
        "written in the format of the library speculators, which vLLM's own methods read too. "
        "Default: a trained vector.",
        show_default=False,
    ),
]

_SHORT = "a smaller --position-gamma above 0 trains the first slots more"
REMOVED_SHORT = {"--short-block-size": _SHORT, "--short-block-share": _SHORT}
REMOVED = {"--speculators": "--mask-token-id ID writes the head in that format, so pass that one"}


@dataclass(frozen=True, kw_only=True)
class AnchorRecipe(Recipe):
    """How many blocks a step packs."""

    anchors_per_step: Annotated[int, Option(min=1, help="Blocks per step and process.")] = 640
    anchor_stride: Annotated[int, Option(min=1, help="One anchor per this many tokens.")] = 3
    anchors_per_sequence: Annotated[
        int, Option(min=0, help="Maximum blocks of an answer; 0: no limit.")
    ] = 0


@dataclass(frozen=True, kw_only=True)
class AnyBlockRun(NewHeadOptions):
    """Folders and shape of the run of a head with a block."""

    shape_options: ClassVar[tuple[str, ...]] = (*NewHeadOptions.shape_options, "num_layers")
    num_layers: Annotated[int, Option(min=1, help="Draft layers; not with --init-from.")] = 2
    mask_token_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class BlockRun(AnyBlockRun):
    """Folders and shape of a block head's run."""

    causal: bool
    init_from: Annotated[
        str, Option(help="Folder of a JetSpec or DFlash head for this target to start from.")
    ] = ""
    block_size: Annotated[
        int, Option(min=0, help="Slots per block, with the anchor; 0: 8, or as in --init-from.")
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size == 1:
            raise ValueError(
                "--block-size 1, legal: 0, or 2 and more (the anchor and drafted tokens); raise it"
            )


@dataclass(frozen=True, kw_only=True)
class WholeBlockRun(BlockRun):
    """Folders and shape of a bidirectional block head's run."""

    mask_token_id: MaskToken = None


@dataclass(frozen=True, kw_only=True)
class BlockRecipe(AnchorRecipe, DistillationRecipe):
    """Recipe of a causal block head; a `position_gamma` of None becomes the head's default."""

    compile: bool = True
    position_gamma: Annotated[
        float | None,
        Option(
            help="Slot j has weight exp(-(j-1)/gamma); 0: equal weights. Default: 4 for jetspec; "
            "for dflash by block size (8: 4, 10: 5, 16: 7).",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WholeBlockRecipe(BlockRecipe):
    """Recipe of a bidirectional block head."""

    loss: str = "sft"


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds both commands."""
    summary = "Trains a JetSpec head: a block head whose slots see the earlier slots."
    add_training(
        train_app,
        "jetspec",
        summary,
        BlockRun,
        BlockRecipe,
        recipes_of("jetspec"),
        removed=REMOVED_SHORT,
        causal=True,
        mask_token_id=None,
    )
    summary = "Trains a DFlash head: a block head whose slots see the whole block."
    add_training(
        train_app,
        "dflash",
        summary,
        WholeBlockRun,
        WholeBlockRecipe,
        recipes_of("dflash"),
        removed={**REMOVED, **REMOVED_SHORT},
        causal=False,
    )
