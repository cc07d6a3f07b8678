# SPDX-License-Identifier: Apache-2.0
"""A whole run of a block head: set up or resume, train, estimate acceptance, export."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.methods.block.checkpoint import load_block_head, save_block_head
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.evaluate import evaluate_head
from vllm_specplug.methods.block.train.start import (
    check_trainable,
    grow,
    head_config_for,
    init_from_target,
)
from vllm_specplug.methods.block.train.trainer import BlockTrainer, TrainOptions
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.loop import Log, LoopOptions, OnStep
from vllm_specplug.train.run import (
    VOCABULARY_NAME,
    data_facts,
    layer_scales,
    open_training,
    origin,
    run_head,
)
from vllm_specplug.train.target import TargetTables, TargetWeights
from vllm_specplug.train.vocabulary import draft_vocabulary, vocabulary_coverage

TARGET_LAYERS = "target layers"
# What a head may have more of than the one it starts from.
_GROWING = ("num_hidden_layers", "intermediate_size")
DEFAULT_NUM_LAYERS, DEFAULT_BLOCK_SIZE, DEFAULT_DRAFT_VOCAB_SIZE = 2, 8, 8192


@dataclass(frozen=True, kw_only=True)
class RunOptions(LoopOptions):
    """Folders, shape and loop options of a block head's run.

    A shape of 0 stands for that of the head in `init_from`, without one for 2 layers, the
    target's MLP width, blocks of 8 slots, 8,192 draft tokens.
    """

    target: str
    features: str
    heldout: str
    causal: bool
    num_layers: int = 0
    intermediate_size: int = 0
    block_size: int = 0
    draft_vocab_size: int = 0
    init_from: str = ""
    eval_sequences: int = 64


def train_block_head(
    run: RunOptions,
    options: TrainOptions,
    log: Log = print,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Trains until `options.total_steps` or `run.max_minutes`; writes into `run.out`:

    `state.pt` and `draft_ids.pt` to resume, and `head/` (config.json, model.safetensors,
    provenance.json), exported at every evaluation. Returns the provenance facts.
    """
    out = Path(run.out)
    training = open_training(run, run, FeatureStore, options.seed)
    store, weights, tables = training.store, training.weights, training.tables
    setup_path = out / VOCABULARY_NAME
    if run.resume and setup_path.is_file():
        setup = torch.load(setup_path, weights_only=True)
        initial = None
        shape = BlockHeadConfig.from_dict(setup["config"]) if "config" in setup else None
        ids, coverage = setup["ids"], setup["coverage"]
        init_facts = setup.get("init_from", TARGET_LAYERS)
    else:
        initial, initial_ids = load_initial(run, weights, tables, store)
        shape = None if initial is None else initial.config
        ids, coverage = _draft_ids(run, store, weights, initial_ids)
        init_facts = origin(run.init_from) or TARGET_LAYERS
    config = wanted_config(
        run, weights.config, store, len(ids), shape, may_grow=initial is not None
    )
    if not run.resume and training.accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        setup = {"ids": ids, "coverage": coverage, "config": config.to_dict()}
        torch.save({**setup, "init_from": init_facts}, setup_path)
    head = BlockHead(config)
    if initial is None or grows(initial.config, config):
        init_from_target(
            head,
            weights,
            tables,
            layer_scales(store, len(config.target_layer_ids)),
            generator=torch.Generator().manual_seed(options.seed),
        )
    if initial is not None:
        grow(head, initial)
    trainer = BlockTrainer(
        head,
        store,
        options,
        embed_tokens=tables.embed_tokens,
        draft_lm_head=tables.lm_head[ids].contiguous(),
        target_ids=ids,
        accelerator=training.accelerator,
    )
    held = training.held
    return run_head(
        trainer,
        run,
        target=run.target,
        shape={
            "num_layers": config.num_hidden_layers,
            "block_size": config.block_size,
            "target_layer_ids": list(config.target_layer_ids),
            "draft_vocab_size": len(ids),
            "causal": config.causal,
        },
        data=data_facts(store, coverage),
        init_from=init_facts,
        heldout=len(held),
        evaluate=lambda: evaluate_head(
            trainer.averaged_head(), held, trainer.drafting_embeds(), trainer.lm_head, ids
        ),
        save=lambda folder: save_block_head(
            folder, trainer.averaged_head(), d2t=ids - torch.arange(len(ids))
        ),
        log=log,
        on_step=on_step,
    )


def load_initial(
    run: RunOptions, weights: TargetWeights, tables: TargetTables, store: FeatureStore
) -> tuple[BlockHead | None, torch.Tensor | None]:
    """The head of `run.init_from` and its draft ids, or (None, None) for none.

    Only the weights are taken: its own mask inside a block is replaced by that of this run.
    """
    if not run.init_from:
        return None, None
    head, extras = load_block_head(run.init_from, weights.config, causal=run.causal)
    check_trainable("init_from", run.init_from, head)
    if extras.lm_head is not None or extras.embed_tokens is not None:
        raise ValueError(
            f"init_from = {run.init_from!r} ships its own LM head or embeddings, legal: a "
            "head that uses the target's; choose another head"
        )
    if head.config.target_layer_ids != store.target_layer_ids:
        raise ValueError(
            f"init_from = {run.init_from!r} reads target layers "
            f"{list(head.config.target_layer_ids)}, legal: those of the features, "
            f"{list(store.target_layer_ids)}; make features with --layers"
        )
    head = head.float()
    if extras.mask_from_embedding:
        head.mask_embedding.copy_(tables.embed_tokens[head.config.mask_token_id].float())
    return head, extras.target_ids(head.config.draft_vocab_size)


def wanted_config(
    run: RunOptions,
    target: dict[str, Any],
    store: FeatureStore,
    draft_vocab_size: int,
    initial: BlockHeadConfig | None,
    may_grow: bool,
) -> BlockHeadConfig:
    """Shape of the head to train.

    Raises ValueError where `run` asks for another shape than `initial` has, the head to start
    from or the one to resume; with `may_grow` it may have more layers and a wider MLP.
    """
    config = head_config_for(
        target,
        store.target_layer_ids,
        num_layers=run.num_layers or (initial.num_hidden_layers if initial else DEFAULT_NUM_LAYERS),
        block_size=run.block_size or (initial.block_size if initial else DEFAULT_BLOCK_SIZE),
        draft_vocab_size=draft_vocab_size,
        intermediate_size=run.intermediate_size or (initial.intermediate_size if initial else None),
        causal=run.causal,
    )
    if initial is not None:
        # The block's length is no shape of a weight, nor is how far the head goes, which heads of
        # before did not say; everything else must agree.
        free = (
            "block_size", "draft_vocab_size", "mask_token_id", "causal", "max_position_embeddings",
        )  # fmt: skip
        for name in (f.name for f in fields(BlockHeadConfig) if f.name not in free):
            have, want = getattr(initial, name), getattr(config, name)
            grown = may_grow and name in _GROWING
            if grown:
                same = have <= want
            elif isinstance(want, float):
                same = abs(have - want) <= 1e-6 * abs(want)
            else:
                same = have == want
            if not same:
                option = name.replace("num_hidden", "num")
                raise ValueError(
                    f"{option} = {want!r}, legal: {have!r}{' or more' if grown else ''}, as in "
                    "the head this run starts from or resumes; leave the option out or choose "
                    "another head"
                )
    return config


def grows(initial: BlockHeadConfig, wanted: BlockHeadConfig) -> bool:
    return any(getattr(initial, name) != getattr(wanted, name) for name in _GROWING)


def _draft_ids(
    run: RunOptions,
    store: FeatureStore,
    target: TargetWeights,
    initial: torch.Tensor | None,
) -> tuple[torch.Tensor, float]:
    vocab_size = int(target.config["vocab_size"])
    if initial is not None and run.draft_vocab_size in (0, len(initial)):
        return initial, vocabulary_coverage(store, initial)
    size = min(run.draft_vocab_size or DEFAULT_DRAFT_VOCAB_SIZE, vocab_size)
    always = list(target.end_token_ids)
    if initial is not None and size > len(initial):
        # A larger vocabulary keeps the tokens that the head has learnt to draft.
        always = initial.tolist()
    return draft_vocabulary(store, size, vocab_size, always)
