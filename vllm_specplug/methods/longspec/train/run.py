# SPDX-License-Identifier: Apache-2.0
"""Starts a LongSpec layer's training run."""

from __future__ import annotations

from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
from vllm_specplug.methods.longspec.checkpoint import load_longspec_head, save_longspec_head
from vllm_specplug.methods.longspec.config import LongSpecConfig, check_window
from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.longspec.train.features import KVFeatureStore, OnlineKV
from vllm_specplug.methods.longspec.train.objective import (
    LongSpecObjective,
    init_longspec_from_target,
)
from vllm_specplug.methods.longspec.train.options import LongSpecRecipe, LongSpecRun
from vllm_specplug.train.run import (
    HeadInTraining,
    continued_ids,
    draft_ids,
    open_features,
)


def start(run: LongSpecRun, recipe: LongSpecRecipe) -> HeadInTraining:
    """Returns a new layer from the target's last one, or the head of the previous stage."""
    check_window("window_size", run.window_size)
    if run.layers:
        raise ValueError(
            f"--layers {run.layers}, legal: none, because the layer reads the target's last one; "
            "leave it out"
        )
    training = open_features(run, recipe, KVFeatureStore, OnlineKV)
    config, vocab_size = training.weights.config, training.vocab_size
    if run.init_from:
        head, target_ids = load_longspec_head(run.init_from, config)
        head = head.float()
        ids = continued_ids(training, target_ids_or_all(target_ids, vocab_size))
    else:
        width = training.new_width(run.intermediate_size)
        ids = draft_ids(training, run.draft_vocab_size, run.vocab_from)
        shape = LongSpecConfig.for_target(
            config,
            window_size=run.window_size,
            draft_vocab_size=len(ids),
            intermediate_size=width,
        )
        head = LongSpecHead(shape)
        init_longspec_from_target(head, training.weights)
    # The whole vocabulary needs no map.
    target_ids = None if len(ids) == vocab_size else ids
    return HeadInTraining(
        training=training,
        head=head,
        tables=training.draft_tables(ids),
        objective=LongSpecObjective(recipe),
        shape={
            "window_size": head.config.window_size,
            "draft_vocab_size": len(ids),
            "intermediate_size": head.config.intermediate_size,
        },
        save=lambda folder, head: save_longspec_head(folder, head, target_ids=target_ids),
    )
