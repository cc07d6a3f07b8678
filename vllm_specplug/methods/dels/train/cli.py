# SPDX-License-Identifier: Apache-2.0
"""`specplug train dels` and `specplug data unigram`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specplug.train import cli_common as common

Data = Annotated[
    Path, typer.Option(help="Folder made by `specplug data generate` or `specplug data features`.")
]


@common.with_shared_options(
    optimizer="adamw", adam_learning_rate=6e-4, ema_decay=0.99, save_every=250
)
def train_dels(
    target: common.Target,
    data: Data,
    heldout: Annotated[
        Path,
        typer.Option(help="Held-out answers, or features, with which acceptance is measured."),
    ],
    out: common.Out,
    kind: Annotated[str, typer.Option(help="gru, or markov, which reads only one token.")] = "gru",
    backbone: Annotated[
        str,
        typer.Option(
            help="Folder of the draft head to fuse with: only its tokens are scored, and "
            "acceptance is measured with it."
        ),
    ] = "",
    block_size: Annotated[
        int,
        typer.Option(min=0, help="Tokens per block, anchor included; 0: the backbone's, or 16."),
    ] = 0,
    hidden_size: Annotated[int, typer.Option(min=1, help="State size of the GRU.")] = 1024,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the output.")] = 256,
    input_size: Annotated[
        int, typer.Option(min=0, help="Input size of the GRU; 0: the embedding's width.")
    ] = 0,
    parameterization: Annotated[
        str,
        typer.Option(
            help="target_factorized: reads the target's embeddings; direct_vocab: a separate table."
        ),
    ] = "target_factorized",
    lm_head_mode: Annotated[
        str,
        typer.Option(
            help="target_lm_head: the target's LM head times a matrix; low_rank: a separate table."
        ),
    ] = "target_lm_head",
    rank_activation: Annotated[str, typer.Option(help="silu or identity; gru only.")] = "silu",
    anchor_input: Annotated[
        bool,
        typer.Option(help="Whether serving feeds the anchor (training does)."),
    ] = False,
    loss: Annotated[
        str,
        typer.Option(
            help="sft: cross-entropy of the answer; forward_kl or reverse_kl to the target's "
            "distribution, which needs features."
        ),
    ] = "sft",
    temperature: common.Temperature = 1.0,
    position_gamma: Annotated[
        float, typer.Option(help="Offset k has weight exp(-k/gamma); 0: equal weights.")
    ] = 7.0,
    anchors_per_step: common.BlocksPerStep = 1024,
    anchors_per_sample: Annotated[int, typer.Option(min=1, help="Maximum blocks per answer.")] = 64,
    vocab_per_step: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of tokens whose scores a step trains, half of them the most frequent; "
            "0: all. Not with sft.",
        ),
    ] = 0,
    min_supervised: Annotated[
        int, typer.Option(min=2, help="Answers with fewer tokens are left out.")
    ] = 32,
    eval_alpha: Annotated[float, typer.Option(help="alpha of the measured fusion.")] = 0.3,
    eval_beta: Annotated[float, typer.Option(help="beta of the measured fusion.")] = 0.3,
    **shared: Any,
) -> None:
    """Trains the short-context head of DeLS; needs only text and the target's embeddings."""
    given: dict[str, Any] = {**locals(), **shared}
    from vllm_specplug.methods.dels.train.run import LocalRunOptions, train_local_head
    from vllm_specplug.methods.dels.train.trainer import LocalOptions

    common.run_training(train_local_head, given, LocalRunOptions, LocalOptions)


def unigram(
    target: common.Target,
    data: Data,
    out: Annotated[Path, typer.Option(help="File to write, *.safetensors; with a JSON file.")],
) -> None:
    """Counts the supervised tokens of answers: the prior that DeLS divides out once."""
    from vllm_specplug.methods.dels.train.unigram_counts import write_unigram

    with common.friendly_errors():
        facts = write_unigram(target, data, out)
    typer.echo(
        f"{facts['total_tokens']:,} tokens of {facts['sequences']:,} answers, "
        f"{facts['distinct_tokens']:,} distinct, in {out}"
    )


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds the commands."""
    train_app.command("dels")(train_dels)
    data_app.command("unigram")(unigram)
