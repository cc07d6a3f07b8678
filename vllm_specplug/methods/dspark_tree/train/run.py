# SPDX-License-Identifier: Apache-2.0
"""A whole DSpark training run: set up or resume, loop, estimate acceptance, export the head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.start import head_config_for, init_from_target
from vllm_specplug.methods.dspark_tree.checkpoint import load_dspark_head, save_dspark_head
from vllm_specplug.methods.dspark_tree.config import DSparkConfig
from vllm_specplug.methods.dspark_tree.train.evaluate import evaluate_dspark
from vllm_specplug.methods.dspark_tree.train.trainer import (
    DSparkModel,
    DSparkRecipe,
    DSparkTrainer,
)
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.loop import Log, LoopOptions, OnStep
from vllm_specplug.train.run import layer_scales, open_training, origin, run_head
from vllm_specplug.train.target import TargetTables, TargetWeights


@dataclass(frozen=True)
class DSparkRun:
    """What a run reads and the shape of its head.

    `init_from` starts from the block of another head, with its shape and draft vocabulary, and from
    its Markov head where it has one; `vocab_from` takes the draft vocabulary of any head for this
    target.
    """

    target: str
    features: str
    heldout: str
    num_layers: int = 2
    intermediate_size: int = 0
    block_size: int = 7
    markov_rank: int = 64
    confidence: bool = True
    draft_vocab_size: int = 8192
    vocab_from: str = ""
    init_from: str = ""
    eval_sequences: int = 64


def train_dspark(
    run: DSparkRun,
    options: DSparkRecipe,
    loop: LoopOptions,
    log: Log = print,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Trains and writes into `loop.out`: `state.pt` and `draft_ids.pt` to resume, and `head/`
    (config.json, model.safetensors, provenance.json). Returns the provenance facts."""
    if run.markov_rank < 1:
        raise ValueError(f"--markov-rank {run.markov_rank}, legal: 1 or more; raise it")
    training = open_training(run, loop, FeatureStore, options.seed)
    store, weights, tables = training.store, training.weights, training.tables
    if run.init_from:
        model, ids = _continued(run, weights, tables, store.target_layer_ids)
    else:
        ids = training.draft_ids(run.draft_vocab_size, run.vocab_from)
        model = DSparkModel(dspark_config(run, weights.config, store.target_layer_ids, len(ids)))
        init_from_target(
            model.block,
            weights,
            tables,
            layer_scales(store, len(store.target_layer_ids)),
            generator=torch.Generator().manual_seed(options.seed),
        )
    trainer = DSparkTrainer(
        model,
        store,
        options,
        embed_tokens=tables.embed_tokens,
        draft_lm_head=tables.lm_head[ids].contiguous(),
        target_ids=ids,
        accelerator=training.accelerator,
    )
    held, config = training.held, model.config

    def save(folder: Path) -> None:
        averaged = trainer.averaged_model()
        confidence = averaged.confidence_head.proj if config.confidence_size else None
        save_dspark_head(
            folder,
            averaged.block,
            averaged.markov_head.markov_w1.weight,
            averaged.markov_head.markov_w2.weight,
            confidence=None if confidence is None else (confidence.weight, confidence.bias),
            d2t=ids - torch.arange(len(ids)) if len(ids) < config.block.vocab_size else None,
        )

    return run_head(
        trainer,
        loop,
        target=run.target,
        shape={
            "num_layers": config.block.num_hidden_layers,
            "intermediate_size": config.block.intermediate_size,
            "block_size": config.block.block_size,
            "target_layer_ids": list(config.block.target_layer_ids),
            "draft_vocab_size": len(ids),
            "markov_rank": config.markov_rank,
            "confidence": config.confidence_size > 0,
        },
        data=training.data_facts(ids),
        init_from=origin(run.init_from),
        heldout=len(held),
        evaluate=lambda: evaluate_dspark(
            trainer.averaged_model(), held, trainer.drafting_embeds(), trainer.lm_head, ids
        ),
        save=save,
        log=log,
        on_step=on_step,
    )


def dspark_config(
    run: DSparkRun, target: dict[str, Any], layers: tuple[int, ...], draft_vocab_size: int
) -> DSparkConfig:
    """A head with the target's own layer shape."""
    block = head_config_for(
        target,
        layers,
        num_layers=run.num_layers,
        block_size=run.block_size,
        draft_vocab_size=draft_vocab_size,
        intermediate_size=run.intermediate_size or None,
        causal=False,
    )
    return _with_markov(run, replace(block, sample_from_anchor=True), run.markov_rank)


def _with_markov(run: DSparkRun, block: BlockHeadConfig, rank: int) -> DSparkConfig:
    return DSparkConfig(block, rank, block.hidden_size + rank if run.confidence else 0)


def _continued(
    run: DSparkRun, weights: TargetWeights, tables: TargetTables, layers: tuple[int, ...]
) -> tuple[DSparkModel, torch.Tensor]:
    """The model that starts from the head in `run.init_from`, and its draft vocabulary."""
    head, extras, markov, _ = load_dspark_head(run.init_from, weights.config)
    problems = {
        f"reads target layers {list(head.config.target_layer_ids)}, the features hold "
        f"{list(layers)}; make features with its layers": head.config.target_layer_ids != layers,
        "has sliding-window layers, which are not trained; choose another head": bool(
            head.config.windows
        ),
        "ships its own LM head or embeddings, which are not trained; choose another head": (
            extras.lm_head is not None or extras.embed_tokens is not None
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"--init-from {run.init_from!r} {problem}")
    head = head.float().requires_grad_(True)
    if extras.mask_from_embedding:
        row = tables.embed_tokens[head.config.mask_token_id].float()
        head.mask_embedding.data.copy_(row)
    block = replace(
        head.config, causal=False, sample_from_anchor=True, block_size=run.block_size,
        mask_token_id=None,
    )  # fmt: skip
    rank = run.markov_rank if markov is None else markov.config.rank
    trained = BlockHead(block)
    trained.load_state_dict(head.state_dict())
    model = DSparkModel(_with_markov(run, block, rank), trained)
    if markov is not None:
        with torch.no_grad():
            model.markov_head.markov_w1.weight.copy_(markov.embed_tokens.weight)
            model.markov_head.markov_w2.weight.copy_(markov.low_rank_lm_head.weight)
    return model, extras.target_ids(block.draft_vocab_size)
