# SPDX-License-Identifier: Apache-2.0
"""Starts a block head's training run: the head, its shape and draft vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_specplug.methods.block.checkpoint import load_block_head, save_block_head
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.objective import BlockObjective, compile_head, default_gamma
from vllm_specplug.methods.block.train.options import BlockRecipe, BlockRun
from vllm_specplug.methods.block.train.start import (
    continued_block,
    new_block,
    speculators_target,
)
from vllm_specplug.train.run import HeadInTraining, Training, open_features

NEW_BLOCK_SIZE = 8


def start(run: BlockRun, recipe: BlockRecipe) -> HeadInTraining:
    """Returns a new head from the target's layers, or the head in `run.init_from`."""
    training = open_features(run, recipe)
    if run.init_from:
        head, ids = _continued(run, training)
    else:
        size = run.block_size or NEW_BLOCK_SIZE
        head, ids = new_block(run, recipe, training, block_size=size, causal=run.causal)
    config = head.config
    if recipe.position_gamma is None:
        recipe = replace(recipe, position_gamma=default_gamma(config))
    if recipe.compile:
        compile_head(head)
    tables = training.draft_tables(ids)
    target = speculators_target(training, config, ids)
    return HeadInTraining(
        training=training,
        head=head,
        tables=tables,
        objective=BlockObjective(recipe),
        shape={
            "num_layers": config.num_hidden_layers,
            "block_size": config.block_size,
            "target_layer_ids": list(config.target_layer_ids),
            "draft_vocab_size": len(ids),
            "causal": config.causal,
        },
        save=lambda folder, head: save_block_head(
            folder, head, target=target, target_ids=ids, lm_head=tables.lm_head
        ),
        saved_tables=(tables.lm_head,) if target and len(ids) < config.vocab_size else (),
    )


def _continued(run: BlockRun, training: Training) -> tuple[BlockHead, torch.Tensor]:
    """Returns the head in `run.init_from` with this run's mask inside a block, and its draft
    vocabulary."""
    head, extras = load_block_head(run.init_from, training.weights.config)
    if head.config.sample_from_anchor:
        raise ValueError(
            f"--init-from {run.init_from!r} samples from the anchor's slot, legal: a head whose "
            "slot j predicts the token at j; train it with `specplug train dspark`"
        )
    return continued_block(
        run.init_from, head, extras, training,
        block_size=run.block_size, causal=run.causal, mask_token_id=run.mask_token_id,
    )  # fmt: skip
