# SPDX-License-Identifier: Apache-2.0
"""A whole run of TokenSwift heads: set up or resume, estimate acceptance, export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.methods.tokenswift.head import TokenSwiftConfig, TokenSwiftHeads, save_heads
from vllm_specplug.methods.tokenswift.train.trainer import (
    TokenSwiftRecipe,
    TokenSwiftTrainer,
    evaluate_heads,
    last_layer_columns,
    new_heads,
)
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.loop import Log, LoopOptions, OnStep, progress_facts, run_loop
from vllm_specplug.train.provenance import write_provenance
from vllm_specplug.train.run import open_training


@dataclass(frozen=True)
class TokenSwiftRun:
    """What a run reads and the shape of its heads; `draft_vocab_size` 0 keeps the whole
    vocabulary, as published."""

    target: str
    features: str
    heldout: str
    num_heads: int = 3
    draft_vocab_size: int = 0
    eval_sequences: int = 64


def train_tokenswift(
    run: TokenSwiftRun,
    options: TokenSwiftRecipe,
    loop: LoopOptions,
    log: Log = print,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Trains and writes into `loop.out`: `state.pt` and `draft_ids.pt` to resume, and `head/`
    (config.json, model.safetensors, provenance.json). Returns the provenance facts."""
    training = open_training(run, loop, FeatureStore, options.seed)
    store, held, tables = training.store, training.held, training.tables
    config = training.weights.config
    vocab, hidden_size = int(config["vocab_size"]), int(config["hidden_size"])
    layers = int(config["num_hidden_layers"])
    columns = last_layer_columns(store, layers, hidden_size)
    ids = training.draft_ids(run.draft_vocab_size or vocab)
    size = len(ids)
    shape = TokenSwiftConfig(
        hidden_size=hidden_size,
        vocab_size=vocab,
        draft_vocab_size=size,
        medusa_heads=run.num_heads,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
    )
    lm_head = tables.lm_head[ids].to(torch.bfloat16).contiguous()
    draft_of = torch.full((vocab,), -1, dtype=torch.int64)
    draft_of[ids] = torch.arange(size)
    trainer = TokenSwiftTrainer(
        new_heads(shape, tables.final_norm),
        store,
        columns,
        options,
        lm_head=lm_head,
        draft_of=draft_of,
        accelerator=training.accelerator,
    )
    if loop.resume:
        trainer.resume(loop.out)
    facts: dict[str, Any] = {}

    def export() -> None:
        averaged = TokenSwiftHeads(shape)
        averaged.load_state_dict(trainer.averaged_weights())
        averaged = averaged.to(trainer.device).eval()
        lengths = evaluate_heads(averaged, held, columns, tables, trainer.lm_head, ids)
        log(
            f"step {trainer.step}: mean acceptance length "
            + "  ".join(f"{name} {value:.3f}" for name, value in lengths.items())
        )
        facts.update(
            {
                "target": Path(run.target).name,
                "data": training.data_facts(ids),
                **progress_facts(trainer),
                "heldout": {"sequences": len(held), "mean_acceptance_length": lengths},
            }
        )
        save_heads(Path(loop.out) / "head", averaged, target_ids=ids if size < vocab else None)
        write_provenance(Path(loop.out) / "head", facts)

    run_loop(trainer, loop, export, log, on_step)
    return facts
