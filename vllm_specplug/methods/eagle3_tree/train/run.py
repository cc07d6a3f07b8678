# SPDX-License-Identifier: Apache-2.0
"""Starts an EAGLE-3 head's training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
from vllm_specplug.methods.block.speculators_format import HeadTarget
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head, save_eagle3_head
from vllm_specplug.methods.eagle3_tree.config import Eagle3Config
from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.methods.eagle3_tree.train.objective import (
    Eagle3Objective,
    init_eagle3_from_target,
)
from vllm_specplug.methods.eagle3_tree.train.options import Eagle3Recipe, Eagle3Run
from vllm_specplug.train.run import (
    HeadInTraining,
    continued_ids,
    draft_ids,
    layer_scales,
    open_features,
)

# Fields of a layer that a new head has like its target.
_OF_TARGET = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "rms_norm_eps", "rope_theta", "max_position_embeddings",
)  # fmt: skip


def eagle3_config(
    target: dict[str, Any],
    layers: tuple[int, ...],
    *,
    draft_vocab_size: int,
    intermediate_size: int = 0,
    norm_output: bool = False,
) -> Eagle3Config:
    """Returns the shape of a head with the width, heads and rotary embedding of a target."""
    layer = {
        **{name: target.get(name) for name in _OF_TARGET},
        "rope_parameters": target.get("rope_parameters") or target.get("rope_scaling"),
        "intermediate_size": intermediate_size or target["intermediate_size"],
        "draft_vocab_size": draft_vocab_size,
        "norm_output": norm_output,
        "target_layer_ids": list(layers),
    }
    return Eagle3Config.from_dict(layer, num_target_layers=target["num_hidden_layers"])


def _check_kind(config: Eagle3Config, path: str) -> None:
    """Refuses heads that this trainer cannot continue."""
    unlike = []
    if config.num_hidden_layers > 1:
        unlike.append(f"has {config.num_hidden_layers} layers")
    windows = sorted({window for window in config.windows if window is not None})
    if windows:
        unlike.append(f"has a sliding window of {windows[0]}")
    if config.mask_token_id is not None:
        unlike.append(f"drafts in parallel (mask_token_id {config.mask_token_id})")
    if unlike:
        raise ValueError(
            f"--init-from {path!r} {' and '.join(unlike)}; legal: one layer of full attention that "
            "drafts token by token. Continue such a head with its own trainer"
        )


def start(run: Eagle3Run, recipe: Eagle3Recipe) -> HeadInTraining:
    """Returns a new head from the target's layers, or the head and LM head in `run.init_from`."""
    training = open_features(run, recipe)
    store, weights = training.store, training.weights
    layers = store.target_layer_ids
    lm_head: torch.Tensor | None = None
    if run.init_from:
        head, extras = load_eagle3_head(run.init_from, weights.config)
        head = head.float()
        _check_kind(head.config, run.init_from)
        if head.config.target_layer_ids != layers:
            raise ValueError(
                f"--init-from {run.init_from!r} reads layers {head.config.target_layer_ids}, the "
                f"features hold {layers}; make features with its layers"
            )
        ids = continued_ids(training, target_ids_or_all(extras.target_ids, training.vocab_size))
        lm_head = extras.lm_head
    else:
        width = training.new_width(run.intermediate_size)
        ids = draft_ids(training, run.draft_vocab_size, run.vocab_from)
        config = eagle3_config(
            weights.config,
            layers,
            draft_vocab_size=len(ids),
            intermediate_size=width,
            norm_output=run.norm_output,
        )
        head = Eagle3Head(config)
        generator = torch.Generator().manual_seed(recipe.seed)
        init_eagle3_from_target(head, weights, training.tables, layer_scales(store), generator)
    tables = training.draft_tables(ids, lm_head)
    made_for: HeadTarget | None = None
    saved: dict[str, Any] = {}
    if run.save_lm_head or run.speculators:
        saved["lm_head"] = tables.lm_head
    if run.speculators:
        made_for = HeadTarget.of(run.target, head.config, ids, "--speculators")
        # speculators 0.9.0 leaves tables that are missing uninitialised.
        saved["embed_tokens"] = tables.embed_tokens

    def save(folder: Path, head: Eagle3Head) -> None:
        save_eagle3_head(folder, head, target_ids=ids, target=made_for, depth=recipe.steps, **saved)

    return HeadInTraining(
        training=training,
        head=head,
        tables=tables,
        objective=Eagle3Objective(recipe),
        shape={
            "draft_vocab_size": len(ids),
            "intermediate_size": head.config.intermediate_size,
            "target_layer_ids": list(layers),
            "norm_output": head.config.norm_output,
        },
        save=save,
        saved_tables=tuple(saved.values()),
    )
