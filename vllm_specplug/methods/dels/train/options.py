# SPDX-License-Identifier: Apache-2.0
"""`specplug train dels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer import Option

from vllm_specplug.methods.recipes import recipes_of
from vllm_specplug.train.cli_common import add_training
from vllm_specplug.train.options import DistillationRecipe, RunOptions

_ANCHOR = 'set "anchor_input" in the head\'s config.json, which serving reads'
REMOVED = {
    "--parameterization": "heads read the target's embeddings (target_factorized), so leave it out",
    "--lm-head-mode": "heads score with the target's LM head (target_lm_head), so leave it out",
    "--input-size": "the GRU reads embeddings of the target's width, so leave it out",
    "--rank-activation": "the activation is silu, so leave it out",
    "--anchor-input": _ANCHOR,
    "--no-anchor-input": _ANCHOR,
    "--data": "name features with --features, or answers with --answers",
    "--min-supervised": "answers of fewer than 4 tokens are left out anyway, so leave it out",
}


@dataclass(frozen=True, kw_only=True)
class LocalRun(RunOptions):
    """Folders and shape of a local head's run. With a `backbone` only the tokens it drafts are
    scored."""

    save_every: int = 250
    kind: Annotated[str, Option(help="gru, or markov, which reads only one token.")] = "gru"
    backbone: Annotated[
        str,
        Option(help="Folder of the draft head to fuse with: only its tokens are scored."),
    ] = ""
    block_size: Annotated[
        int, Option(min=0, help="Tokens per block, anchor included; 0: the backbone's, or 16.")
    ] = 0
    hidden_size: Annotated[int, Option(min=1, help="State size of the GRU.")] = 1024
    rank: Annotated[int, Option(min=1, help="Rank of the output.")] = 256


@dataclass(frozen=True, kw_only=True)
class LocalRecipe(DistillationRecipe):
    """Recipe of a local head's run.

    `vocab_per_step` above 0 trains each step on as many vocabulary tokens, half of them the
    most frequent, the others drawn at random: the softmax, and the target's, is taken among them.
    """

    optimizer: str = "adamw"
    adam_learning_rate: float = 6e-4
    ema_decay: float = 0.99
    compile: bool = True
    loss: Annotated[
        str,
        Option(
            help="sft: cross-entropy of the answer; forward_kl: divergence from the target's "
            "distribution, from stored features or from the target beside the trainer."
        ),
    ] = "sft"
    position_gamma: Annotated[
        float, Option(min=0, help="Offset k has weight exp(-k/gamma); 0: equal weights.")
    ] = 7.0
    anchors_per_step: Annotated[int, Option(min=1, help="Blocks per step and process.")] = 1024
    anchors_per_sample: Annotated[int, Option(min=1, help="Maximum blocks per answer.")] = 64
    vocab_per_step: Annotated[
        int,
        Option(
            min=0,
            help="Number of tokens whose scores a step trains, half of them the most frequent; "
            "0: all. Not with sft.",
        ),
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "sft" and self.vocab_per_step:
            raise ValueError(
                f"--vocab-per-step {self.vocab_per_step}, legal with loss sft: 0, since an "
                "answer's token may not be among those drawn; use forward_kl or leave it out"
            )


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds the command."""
    summary = "Trains the short-context head of DeLS; with the loss sft the target does not run."
    add_training(train_app, "dels", summary, LocalRun, LocalRecipe, recipes_of("dels"), REMOVED)
