# SPDX-License-Identifier: Apache-2.0
"""`specplug data longspec-features` and `specplug train longspec`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specplug.methods.longspec.train.options import LongSpecRecipe, LongSpecRun
from vllm_specplug.methods.recipes import recipes_of
from vllm_specplug.options import check_target
from vllm_specplug.train import cli_common as common
from vllm_specplug.train.options import REPETITIVE_SHARE


def features(
    target: common.Target,
    data: Annotated[Path, typer.Option(help="Folder made by `specplug data generate`.")],
    out: Annotated[Path, typer.Option(help="Training features; finished shards are kept.")],
    heldout: Annotated[
        Path | None, typer.Option(help="Held-out features, from greedy answers.")
    ] = None,
    anchor_offsets: Annotated[
        bool, typer.Option(help="Shift positions, for sequences shorter than those to be served.")
    ] = True,
    heldout_answers: Annotated[
        int, typer.Option(min=0, help="With --heldout: greedy answers kept for it.")
    ] = 64,
    tokens_per_batch: common.TokensPerBatch = 4096,
    seed: Annotated[int, typer.Option(help="Seed of the shifts.")] = 0,
) -> None:
    """Runs the target once and stores its last layer's keys and values, as LongSpec reads them."""
    import numpy as np

    from vllm_specplug.methods.longspec.train.features import (
        draw_offset,
        kv_meta,
        write_kv_shard,
    )
    from vllm_specplug.train.features import TokenSequence
    from vllm_specplug.train.run import new_accelerator
    from vllm_specplug.train.target import TargetWeights

    with common.friendly_errors():
        check_target(str(target))
        aside = 0 if heldout is None else heldout_answers
        parts = common.read_split(data, aside, REPETITIVE_SHARE)
        accelerator = new_accelerator()
        model: Any = TargetWeights(target).load_frozen(accelerator.device)
        most = model.config.max_position_embeddings

        def write(
            folder: Path, part: list[TokenSequence], salt: int, on_batch: Callable[[int], None]
        ) -> None:
            shifted = anchor_offsets and folder.parent == out
            rng = np.random.default_rng([seed, salt])
            offsets = [draw_offset(len(s.tokens), most, rng) if shifted else (0, 0) for s in part]
            write_kv_shard(
                folder, part, offsets, model, tokens_per_batch=tokens_per_batch, on_batch=on_batch
            )

        common.write_split(parts, out, heldout, write, accelerator, kv_meta(model))


def register(train_app: typer.Typer, data_app: typer.Typer) -> None:
    """Adds both commands."""
    data_app.command("longspec-features")(features)
    summary = "Trains a LongSpec layer over the target's last-layer keys and values."
    common.add_training(
        train_app, "longspec", summary, LongSpecRun, LongSpecRecipe, recipes_of("longspec")
    )
