# SPDX-License-Identifier: Apache-2.0
"""A whole EAGLE-3 training run: set up or resume, loop, estimate acceptance, export the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head, save_eagle3_head
from vllm_specplug.methods.eagle3_tree.config import Eagle3Config
from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.methods.eagle3_tree.train.evaluate import evaluate_eagle3
from vllm_specplug.methods.eagle3_tree.train.trainer import (
    Eagle3Recipe,
    Eagle3Trainer,
    init_eagle3_from_target,
)
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.loop import Log, LoopOptions, OnStep
from vllm_specplug.train.run import layer_scales, open_training, origin, run_head

# Of each held-out answer: a round costs a forward per level.
EVAL_ROUNDS = 24


@dataclass(frozen=True)
class Eagle3Run:
    """What a run reads and the shape of its head. `init_from` continues from the weights of another
    head and takes its shape and draft vocabulary; `vocab_from` takes the draft vocabulary of any
    head for this target. `save_lm_head` writes the LM head too, which vLLM's own method needs."""

    target: str
    features: str
    heldout: str
    draft_vocab_size: int = 8192
    intermediate_size: int = 0
    norm_output: bool = False
    init_from: str = ""
    vocab_from: str = ""
    save_lm_head: bool = True
    eval_sequences: int = 24


def eagle3_config(
    target: dict[str, Any],
    layers: tuple[int, ...],
    *,
    draft_vocab_size: int,
    intermediate_size: int = 0,
    norm_output: bool = False,
) -> Eagle3Config:
    """A head of the width, heads and rotary embedding of a target's config."""
    hidden, heads = target["hidden_size"], target["num_attention_heads"]
    rope = target.get("rope_parameters") or target.get("rope_scaling") or {}
    layer = {
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or target["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": target.get("num_key_value_heads") or heads,
        "head_dim": target.get("head_dim") or hidden // heads,
        "vocab_size": target["vocab_size"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": target.get("rope_theta"),
        "rope_parameters": rope,
        "max_position_embeddings": target.get("max_position_embeddings"),
        "draft_vocab_size": draft_vocab_size,
        "norm_output": norm_output,
        "target_layer_ids": list(layers),
    }
    return Eagle3Config.from_dict(layer, num_target_layers=target["num_hidden_layers"])


def train_eagle3(
    run: Eagle3Run,
    options: Eagle3Recipe,
    loop: LoopOptions,
    log: Log = print,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Trains and writes into `loop.out`: `state.pt` and `draft_ids.pt` to resume, and `head/`
    (config.json, model.safetensors, provenance.json). Returns the provenance facts."""
    training = open_training(run, loop, FeatureStore, options.seed)
    store, weights, tables = training.store, training.weights, training.tables
    layers = store.target_layer_ids
    lm_head: torch.Tensor | None = None
    if run.init_from:
        head, extras = load_eagle3_head(run.init_from, weights.config, dtype=torch.float32)
        if head.config.target_layer_ids != layers:
            raise ValueError(
                f"--init-from {run.init_from!r} reads layers {head.config.target_layer_ids}, the "
                f"features hold {layers}; make features with its layers"
            )
        ids = torch.arange(training.vocab_size) if extras.target_ids is None else extras.target_ids
        lm_head = extras.lm_head
    else:
        ids = training.draft_ids(run.draft_vocab_size, run.vocab_from)
        config = eagle3_config(
            weights.config,
            layers,
            draft_vocab_size=len(ids),
            intermediate_size=run.intermediate_size,
            norm_output=run.norm_output,
        )
        head = Eagle3Head(config)
        init_eagle3_from_target(
            head,
            weights,
            tables,
            layer_scales(store, len(layers)),
            generator=torch.Generator().manual_seed(options.seed),
        )
    trainer = Eagle3Trainer(
        head,
        store,
        options,
        embed_tokens=tables.embed_tokens,
        draft_lm_head=(tables.lm_head[ids] if lm_head is None else lm_head).contiguous(),
        target_ids=ids,
        accelerator=training.accelerator,
    )
    held = training.held
    embed_tokens, draft_lm_head = tables.embed_tokens.float(), trainer.lm_head.float().cpu()
    return run_head(
        trainer,
        loop,
        target=run.target,
        shape={
            "draft_vocab_size": len(ids),
            "intermediate_size": head.config.intermediate_size,
            "target_layer_ids": list(layers),
            "norm_output": head.config.norm_output,
        },
        data=training.data_facts(ids),
        init_from=origin(run.init_from),
        heldout=len(held),
        evaluate=lambda: evaluate_eagle3(
            trainer.averaged_head(), held, embed_tokens, draft_lm_head, ids, max_rounds=EVAL_ROUNDS
        ),
        save=lambda folder: save_eagle3_head(
            folder,
            trainer.averaged_head(),
            target_ids=ids,
            lm_head=trainer.lm_head if run.save_lm_head else None,
        ),
        log=log,
        on_step=on_step,
    )
