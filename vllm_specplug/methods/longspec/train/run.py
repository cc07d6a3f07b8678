# SPDX-License-Identifier: Apache-2.0
"""A whole LongSpec training run: set up or resume, loop, estimate acceptance, export the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_specplug.methods.longspec.checkpoint import load_longspec_head, save_longspec_head
from vllm_specplug.methods.longspec.config import DEFAULT_WINDOW, LongSpecConfig, check_window
from vllm_specplug.methods.longspec.head import LongSpecHead
from vllm_specplug.methods.longspec.train.evaluate import evaluate_longspec
from vllm_specplug.methods.longspec.train.features import KVFeatureStore
from vllm_specplug.methods.longspec.train.trainer import (
    LongSpecRecipe,
    LongSpecTrainer,
    init_longspec_from_target,
)
from vllm_specplug.train.loop import Log, LoopOptions, OnStep
from vllm_specplug.train.run import open_training, origin, run_head


@dataclass(frozen=True)
class LongSpecRun:
    """What a run reads and the shape of its head. `init_from` continues from the weights of another
    head (the next stage) and takes its shape and draft vocabulary; `vocab_from` takes the draft
    vocabulary of any head for this target."""

    target: str
    features: str
    heldout: str
    window_size: int = DEFAULT_WINDOW
    draft_vocab_size: int = 8192
    vocab_from: str = ""
    intermediate_size: int = 0
    init_from: str = ""
    eval_sequences: int = 24


def train_longspec(
    run: LongSpecRun,
    options: LongSpecRecipe,
    loop: LoopOptions,
    log: Log = print,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Trains and writes into `loop.out`: `state.pt` and `draft_ids.pt` to resume, and `head/`
    (config.json, model.safetensors, provenance.json). Returns the provenance facts."""
    check_window("window_size", run.window_size)
    training = open_training(run, loop, KVFeatureStore, options.seed)
    store, weights, tables = training.store, training.weights, training.tables
    vocab_size = training.vocab_size
    if run.init_from:
        head, extras = load_longspec_head(run.init_from, weights.config, dtype=torch.float32)
        ids = torch.arange(vocab_size) if extras.target_ids is None else extras.target_ids
    else:
        ids = training.draft_ids(run.draft_vocab_size, run.vocab_from)
        head = LongSpecHead(
            LongSpecConfig.for_target(
                weights.config,
                window_size=run.window_size,
                draft_vocab_size=len(ids),
                intermediate_size=run.intermediate_size or None,
            )
        )
        init_longspec_from_target(head, weights)
    trainer = LongSpecTrainer(
        head,
        store,
        options,
        embed_tokens=tables.embed_tokens,
        draft_lm_head=tables.lm_head[ids].contiguous(),
        target_ids=ids,
        accelerator=training.accelerator,
    )
    held = training.held
    embed_tokens = tables.embed_tokens.float()
    # A draft vocabulary that is the whole one needs no map.
    target_ids = None if len(ids) == vocab_size else ids
    return run_head(
        trainer,
        loop,
        target=run.target,
        shape={
            "window_size": head.config.window_size,
            "draft_vocab_size": len(ids),
            "intermediate_size": head.config.intermediate_size,
        },
        data=training.data_facts(ids),
        init_from=origin(run.init_from),
        heldout=len(held),
        evaluate=lambda: evaluate_longspec(
            trainer.averaged_head(), held, embed_tokens, trainer.lm_head.cpu(), ids
        ),
        save=lambda folder: save_longspec_head(
            folder, trainer.averaged_head(), target_ids=target_ids
        ),
        log=log,
        on_step=on_step,
    )
