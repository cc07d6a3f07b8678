# SPDX-License-Identifier: Apache-2.0
"""Starts a DSpark head's training run and writes its head."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.train.objective import compile_head
from vllm_specplug.methods.block.train.start import (
    continued_block,
    new_block,
    speculators_target,
)
from vllm_specplug.methods.dspark_tree.checkpoint import load_dspark_head, save_dspark_head
from vllm_specplug.methods.dspark_tree.config import DSparkConfig
from vllm_specplug.methods.dspark_tree.train.objective import DSparkModel, DSparkObjective
from vllm_specplug.methods.dspark_tree.train.options import DSparkRecipe, DSparkRun
from vllm_specplug.train.run import HeadInTraining, Training, open_features


def start(run: DSparkRun, recipe: DSparkRecipe) -> HeadInTraining:
    """Returns a new head from the target's layers, or the head in `run.init_from`."""
    training = open_features(run, recipe)
    if run.init_from:
        model, ids = _continued(run, training)
    else:
        block, ids = new_block(
            run, recipe, training,
            block_size=run.block_size, causal=False, sample_from_anchor=True,
        )  # fmt: skip
        model = DSparkModel(_with_markov(run, block.config, run.markov_rank), block)
    if recipe.compile:
        compile_head(model.block)
    config, tables = model.config, training.draft_tables(ids)
    target = speculators_target(training, config, ids)

    def save(folder: Path, model: DSparkModel) -> None:
        confidence = model.confidence_head.proj if config.confidence_size else None
        save_dspark_head(
            folder,
            model.block,
            model.markov_head.markov_w1.weight,
            model.markov_head.markov_w2.weight,
            confidence=None if confidence is None else (confidence.weight, confidence.bias),
            target=target,
            lm_head=tables.lm_head,
            target_ids=ids if len(ids) < config.vocab_size else None,
        )

    return HeadInTraining(
        training=training,
        head=model,
        tables=tables,
        objective=DSparkObjective(recipe),
        shape={
            "num_layers": config.num_hidden_layers,
            "intermediate_size": config.intermediate_size,
            "block_size": config.block_size,
            "target_layer_ids": list(config.target_layer_ids),
            "draft_vocab_size": len(ids),
            "markov_rank": config.markov_rank,
            "confidence": config.confidence_size > 0,
        },
        save=save,
        saved_tables=(tables.lm_head,) if target and len(ids) < config.vocab_size else (),
    )


def _with_markov(run: DSparkRun, block: BlockHeadConfig, rank: int) -> DSparkConfig:
    own = {
        "markov_rank": rank,
        "confidence_size": block.hidden_size + rank if run.confidence else 0,
    }
    return DSparkConfig(**{**vars(block), **own})


def _continued(run: DSparkRun, training: Training) -> tuple[DSparkModel, torch.Tensor]:
    """Returns the model of the head in `run.init_from`, and its draft vocabulary."""
    head, extras, markov, _ = load_dspark_head(run.init_from, training.weights.config)
    if markov is not None and markov.config.slot_size:
        raise ValueError(
            f"--init-from {str(run.init_from)!r} has a Markov head or GRU that reads the block's "
            "states, legal: a head with markov_head_type 'vanilla' or without a Markov head; "
            "training supports no others"
        )
    trained, ids = continued_block(
        run.init_from, head, extras, training,
        block_size=run.block_size, causal=False, sample_from_anchor=True,
        mask_token_id=run.mask_token_id,
    )  # fmt: skip
    rank = run.markov_rank if markov is None else markov.config.rank
    model = DSparkModel(_with_markov(run, trained.config, rank), trained)
    if markov is not None:
        with torch.no_grad():
            model.markov_head.markov_w1.weight.copy_(markov.embed_tokens.weight)
            model.markov_head.markov_w2.weight.copy_(markov.low_rank_lm_head.weight)
    return model, ids
