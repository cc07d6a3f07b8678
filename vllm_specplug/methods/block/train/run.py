# SPDX-License-Identifier: Apache-2.0
"""Starts a block head's training run: the head, its shape and draft vocabulary."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
from vllm_specplug.methods.block.checkpoint import load_block_head, save_block_head
from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.objective import BlockObjective, compile_head, completed
from vllm_specplug.methods.block.train.options import BlockRecipe, BlockRun
from vllm_specplug.methods.block.train.start import (
    check_trainable,
    grow,
    head_config_for,
    init_from_target,
)
from vllm_specplug.train.features import Features
from vllm_specplug.train.run import (
    HeadInTraining,
    Training,
    data_facts,
    layer_scales,
    open_features,
    save_setup,
    started_from,
)
from vllm_specplug.train.vocabulary import VOCABULARY_NAME, draft_vocabulary

TARGET_LAYERS = "target layers"
# Sizes that may be larger than those of the head that a run starts from.
_GROWING = ("num_hidden_layers", "intermediate_size")
DEFAULT_NUM_LAYERS, DEFAULT_BLOCK_SIZE, DEFAULT_DRAFT_VOCAB_SIZE = 2, 8, 8192


def start(run: BlockRun, recipe: BlockRecipe) -> HeadInTraining:
    """Returns a new head from the target's layers, the head in `run.init_from`, or that of a
    resumed run."""
    training = open_features(run, recipe)
    store, weights, tables = training.store, training.weights, training.tables
    setup_path = run.out / VOCABULARY_NAME
    initial: BlockHead | None = None
    if run.resume and setup_path.is_file():
        setup = torch.load(setup_path, weights_only=True)
        shape = BlockHeadConfig.from_dict(setup["config"]) if "config" in setup else None
        ids, origin = setup["ids"], {"init_from": setup.get("init_from", TARGET_LAYERS)}
    else:
        initial, initial_ids = load_initial(run, training)
        shape = None if initial is None else initial.config
        ids = _draft_ids(run, training, initial_ids)
        origin = started_from(run.init_from) if run.init_from else {"init_from": TARGET_LAYERS}
    if not run.init_from:
        training.new_width(run.intermediate_size)
    config = wanted_config(
        run, weights.config, store, len(ids), shape, may_grow=initial is not None
    )
    if not run.resume:
        save_setup(training, {"ids": ids, "config": config.to_dict(), **origin})
    head = BlockHead(config)
    if initial is None or grows(initial.config, config):
        generator = torch.Generator().manual_seed(recipe.seed)
        init_from_target(head, weights, tables, layer_scales(store), generator=generator)
    if initial is not None:
        grow(head, initial)
    recipe = completed(recipe, config)
    if recipe.compile:
        compile_head(head)
    return HeadInTraining(
        training=training,
        head=head,
        tables=training.draft_tables(ids),
        objective=BlockObjective(recipe),
        shape={
            "num_layers": config.num_hidden_layers,
            "block_size": config.block_size,
            "target_layer_ids": list(config.target_layer_ids),
            "draft_vocab_size": len(ids),
            "causal": config.causal,
        },
        data=data_facts(store, ids),
        origin=origin,
        save=lambda folder, head: save_block_head(folder, head, target_ids=ids),
    )


def load_initial(
    run: BlockRun, training: Training[Features]
) -> tuple[BlockHead | None, torch.Tensor | None]:
    """Returns the head of `run.init_from` and its draft ids, or (None, None) without one.

    The mask inside a block is this run's, not the head's.
    """
    if not run.init_from:
        return None, None
    head, extras = load_block_head(run.init_from, training.weights.config, causal=run.causal)
    check_trainable(run.init_from, head)
    if extras.lm_head is not None or extras.embed_tokens is not None:
        raise ValueError(
            f"init_from = {run.init_from!r} ships its own LM head or embeddings, legal: a "
            "head that uses the target's; choose another head"
        )
    layers = training.store.target_layer_ids
    if head.config.target_layer_ids != layers:
        raise ValueError(
            f"init_from = {run.init_from!r} reads target layers "
            f"{list(head.config.target_layer_ids)}, legal: those of the features, "
            f"{list(layers)}; make features with --layers"
        )
    head = head.float()
    if extras.mask_from_embedding:
        row = training.tables.embed_tokens[head.config.mask_token_id]
        head.mask_embedding.copy_(row.float())
    return head, target_ids_or_all(extras.target_ids, training.vocab_size)


def wanted_config(
    run: BlockRun,
    target: dict[str, Any],
    store: Features,
    draft_vocab_size: int,
    initial: BlockHeadConfig | None,
    may_grow: bool,
) -> BlockHeadConfig:
    """Returns the shape of the head to train.

    Args:
        initial: shape of the head to start from or to resume.
        may_grow: whether the run may ask for more layers and a wider MLP than `initial`.

    Raises:
        ValueError: if `run` asks for another shape than `initial`.
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
        # These do not change the shape of a weight, and old heads state no maximum length. All
        # other fields must agree.
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
    run: BlockRun, training: Training[Features], initial: torch.Tensor | None
) -> torch.Tensor:
    if initial is not None and run.draft_vocab_size in (0, len(initial)):
        return initial
    size = min(run.draft_vocab_size or DEFAULT_DRAFT_VOCAB_SIZE, training.vocab_size)
    always = training.weights.end_token_ids
    if initial is not None and size > len(initial):
        # A larger vocabulary keeps the tokens that the head drafts already.
        always = initial.tolist()
    return draft_vocabulary(training.store, size, training.vocab_size, always)
