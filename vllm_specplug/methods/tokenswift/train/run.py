# SPDX-License-Identifier: Apache-2.0
"""Starts a training run of TokenSwift heads."""

from __future__ import annotations

from vllm_specplug.methods.tokenswift.head import TokenSwiftConfig, save_heads
from vllm_specplug.methods.tokenswift.train.objective import (
    TokenSwiftObjective,
    last_layer_columns,
    new_heads,
    require_rows,
)
from vllm_specplug.methods.tokenswift.train.options import TokenSwiftRecipe, TokenSwiftRun
from vllm_specplug.train.run import (
    HeadInTraining,
    draft_ids,
    open_features,
)


def start(run: TokenSwiftRun, recipe: TokenSwiftRecipe) -> HeadInTraining:
    """Returns new heads that repeat the target's prediction."""
    training = open_features(run, recipe)
    config, vocab = training.weights.config, training.vocab_size
    final_norm = training.tables.final_norm
    columns = last_layer_columns(
        training.store, int(config["num_hidden_layers"]), int(config["hidden_size"])
    )
    require_rows(training.store, run.num_heads)
    ids = draft_ids(training, run.draft_vocab_size or vocab)
    shape = TokenSwiftConfig(
        hidden_size=int(config["hidden_size"]),
        vocab_size=vocab,
        draft_vocab_size=len(ids),
        medusa_heads=run.num_heads,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
    )
    return HeadInTraining(
        training=training,
        head=new_heads(shape, final_norm),
        tables=training.draft_tables(ids),
        objective=TokenSwiftObjective(recipe, columns),
        shape={"num_heads": run.num_heads, "draft_vocab_size": len(ids)},
        save=lambda folder, heads: save_heads(
            folder, heads, target_ids=ids if len(ids) < vocab else None
        ),
    )
