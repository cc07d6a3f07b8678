# SPDX-License-Identifier: Apache-2.0
"""Starts a local head's training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.dels.checkpoint import check_kind, save_local_head
from vllm_specplug.methods.dels.train.batch import FinalStates, Texts
from vllm_specplug.methods.dels.train.objective import LocalObjective
from vllm_specplug.methods.dels.train.options import LocalRecipe, LocalRun
from vllm_specplug.methods.dels.unigram import UNIGRAM_NAME, save_unigram
from vllm_specplug.methods.local.head import LocalHead, LocalHeadConfig
from vllm_specplug.train.provenance import head_identity
from vllm_specplug.train.run import HeadInTraining, open_features
from vllm_specplug.train.vocabulary import DraftTables, answer_token_counts

_SHAPE = ("kind", "hidden_size", "input_size", "rank", "rank_activation")


def local_config(run: LocalRun, target: dict[str, Any]) -> LocalHeadConfig:
    """Returns the shape of the head to train. The target's LM head scores every token, trained on
    or not."""
    check_kind(run.kind)
    return LocalHeadConfig(
        kind=run.kind,  # type: ignore[arg-type]
        vocab_size=int(target["vocab_size"]),
        target_hidden_size=int(target["hidden_size"]),
        rank=run.rank,
        hidden_size=run.hidden_size if run.kind == "gru" else 0,
        lm_head_mode="target_lm_head",
    )


def start(run: LocalRun, recipe: LocalRecipe) -> HeadInTraining:
    """Returns a new head."""
    online = Texts if recipe.loss == "sft" else FinalStates
    training = open_features(run, recipe, online=online)
    target, vocab_size = training.weights.config, training.vocab_size
    ids, block_size = torch.arange(vocab_size), run.block_size
    if run.backbone:
        backbone, extras = load_block_head(run.backbone, target)
        ids = target_ids_or_all(extras.target_ids, vocab_size)
        block_size = block_size or backbone.config.block_size
    block_size = block_size or 16
    if block_size < 2:
        raise ValueError(f"block_size = {block_size}, legal: an integer >= 2; raise it")
    counts = answer_token_counts(training.store, vocab_size)
    config = local_config(run, target)
    trained = 2 if config.kind == "markov" else block_size
    ranked = torch.argsort(counts[ids], descending=True, stable=True)
    # The head is small, so its embeddings keep the precision of its parameters.
    embed_tokens = training.tables.embed_tokens.float()
    tables = DraftTables(embed_tokens, training.draft_tables(ids).lm_head, ids)

    def save(folder: Path, head: LocalHead) -> None:
        save_local_head(folder, head)
        save_unigram(folder / UNIGRAM_NAME, counts)

    torch.manual_seed(recipe.seed)
    return HeadInTraining(
        training=training,
        head=LocalHead(config),
        tables=tables,
        objective=LocalObjective(recipe, trained, ranked),
        shape={"block_size": trained, **{name: getattr(config, name) for name in _SHAPE}},
        origin={"backbone": head_identity(run.backbone)} if run.backbone else {},
        save=save,
    )
