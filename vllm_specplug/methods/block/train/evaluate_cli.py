# SPDX-License-Identifier: Apache-2.0
"""`specplug train evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_specplug.train import cli_common as common


def evaluate(
    target: common.Target,
    head: Annotated[Path, typer.Option(help="Folder of a draft head.")],
    features: Annotated[
        Path, typer.Option(help="Features of greedy answers, made with the head's layers.")
    ],
    budgets: Annotated[str, typer.Option(help="Tree sizes in nodes, root excluded.")] = "8,16,32",
    tree_width: Annotated[int, typer.Option(min=1, help="Candidates per depth.")] = 7,
    local_head: Annotated[
        str, typer.Option(help="Local head to fuse with (DeLS): adds its chain and trees.")
    ] = "",
    unigram: Annotated[str, typer.Option(help="Unigram counts; needed where beta is not 0.")] = "",
    alpha: Annotated[
        str, typer.Option(help="Weight of the local head: one number, or one per corrected depth.")
    ] = "0.3",
    beta: Annotated[str, typer.Option(help="Weight of the unigram prior, likewise.")] = "0.3",
    anchor_input: Annotated[
        bool | None,
        typer.Option(help="Feed the anchor to the local head. Default: what the head says."),
    ] = None,
    candidates: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens per slot that are considered and scored by a local head; 0: all."
        ),
    ] = 128,
    by_depth: Annotated[
        bool, typer.Option(help="Also print the share of rounds that reach each depth.")
    ] = False,
) -> None:
    """Prints the mean acceptance length of a head by data set, estimated from features."""
    from vllm_specplug.methods.block.train.evaluate_run import Evaluation

    with common.friendly_errors():
        if 0 < candidates < tree_width:
            raise ValueError(
                f"candidates = {candidates}, legal: 0, or at least tree_width = {tree_width}; "
                "raise it"
            )
        sizes = [common.parse_number(int, "budgets", b) for b in budgets.split(",")]
        run = Evaluation(target, head, features, candidates=candidates)
        run.add_backbone(sizes, tree_width)
        if local_head:
            tables = run.local_tables(local_head, unigram, anchor_input)
            alphas, betas = (
                [common.parse_number(float, name, v) for v in text.split(",")]
                for name, text in (("alpha", alpha), ("beta", beta))
            )
            run.add_local(tables, alphas, betas, sizes, tree_width)
    report = run.report
    policies = list(report.total)
    lines = [["data", *policies], ["all", *(f"{v:.2f}" for v in report.lengths().values())]]
    for source, lengths in report.lengths_by_source().items():
        lines.append([source, *(f"{lengths[p]:.2f}" for p in policies)])
    if by_depth:
        for depth in range(1, run.depth + 1):
            shares = (report.total[p].share_reaching(depth) for p in policies)
            lines.append([f">= {depth}", *(f"{share:.2f}" for share in shares)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
    typer.echo("rank-1 accuracy by slot: " + " ".join(f"{v:.2f}" for v in report.slot_accuracy()))


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds the command."""
    train_app.command("evaluate")(evaluate)
