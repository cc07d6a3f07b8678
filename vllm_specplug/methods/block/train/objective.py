# SPDX-License-Identifier: Apache-2.0
"""The training objective of a block head (JetSpec: causal, DFlash: bidirectional).

Each step packs blocks of several sequences and distils the target's distribution or its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specplug.methods.block.config import BlockHeadConfig
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.blocks import (
    BlockBatch,
    pack_blocks,
    run_blocks,
    sample_anchors,
    thin_anchors,
)
from vllm_specplug.methods.block.train.options import AnchorRecipe, BlockRecipe
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.losses import slot_weights
from vllm_specplug.train.order import random_subset
from vllm_specplug.train.trainer import Objective, StepLoss, Trainer
from vllm_specplug.train.vocabulary import DraftTables

# Shapes are rounded so that the GEMM library reuses its compiled kernels.
_ANCHOR_MULTIPLE, _CONTEXT_MULTIPLE = 8, 64
# Block size -> decay of the loss along the block, in the DFlash trainers.
_DFLASH_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


def default_gamma(config: BlockHeadConfig) -> float:
    """Returns the decay of the loss along a block: 4 for causal heads; for bidirectional ones 4 at
    block size 8, 5 at 10, 7 at 16, linear between these and proportional outside."""
    if config.causal:
        return 4.0
    block_size, sizes = config.block_size, sorted(_DFLASH_GAMMA)
    low, high = sizes[0], sizes[-1]
    if block_size < low or block_size > high:
        edge = low if block_size < low else high
        return _DFLASH_GAMMA[edge] * block_size / edge
    return float(np.interp(block_size, sizes, [_DFLASH_GAMMA[s] for s in sizes]))


def draw_blocks(trainer: Trainer, recipe: AnchorRecipe, config: BlockHeadConfig) -> BlockBatch:
    """Returns a step's blocks of a trainer's next sequences, one per `anchor_stride` tokens."""
    generator = trainer.step_generator()

    def pick(sequence: FeatureSequence, left: int) -> torch.Tensor:
        at = sample_anchors(sequence, recipe.anchor_stride, generator)
        at = thin_anchors(at, _ANCHOR_MULTIPLE, generator)
        return random_subset(at, min(left, recipe.anchors_per_sequence or left), generator)

    sequences, anchors = trainer.draw_rows(recipe.anchors_per_step, pick)
    return pack_blocks(sequences, anchors, config.block_size, _CONTEXT_MULTIPLE, config.first_slot)


def pack_heldout(
    config: BlockHeadConfig, sequence: FeatureSequence, anchors: torch.Tensor, tables: DraftTables
) -> BlockBatch:
    """Returns the blocks of a held-out sequence as inputs beside `tables`."""
    batch = pack_blocks(
        [sequence], [anchors], config.block_size, _CONTEXT_MULTIPLE, config.first_slot
    )
    return tables.inputs(batch)


@dataclass(frozen=True)
class BlockObjective(Objective):
    """Trains a block head by a recipe with a `position_gamma`."""

    recipe: BlockRecipe

    def draw(self, trainer: Trainer) -> BlockBatch:
        return draw_blocks(trainer, self.recipe, trainer.head.config)

    def forward(
        self, head: BlockHead, batch: BlockBatch, embed_tokens: torch.Tensor
    ) -> torch.Tensor:
        return run_blocks(head, batch, embed_tokens)

    def loss(self, trainer: Trainer, batch: BlockBatch) -> StepLoss:
        recipe = self.recipe
        assert recipe.position_gamma is not None
        weights = slot_weights(
            batch.valid.view(len(batch.anchor_tokens), -1), recipe.position_gamma
        )
        hidden = trainer.forward(batch)
        labels = trainer.to_draft[batch.labels]
        loss = trainer.distil(recipe, hidden, batch.teacher, labels, weights)
        return StepLoss(loss, loss, int(batch.valid.sum()), len(batch.positions))

    def drafts(
        self,
        head: BlockHead,
        sequence: FeatureSequence,
        anchors: torch.Tensor,
        tables: DraftTables,
    ) -> torch.Tensor:
        batch = pack_heldout(head.config, sequence, anchors, tables)
        hidden = self.forward(head, batch, tables.embed_tokens)
        return tables.likeliest(hidden).view(len(anchors), -1)


def compile_head(head: BlockHead) -> None:
    """Fuses the elementwise work around the GEMMs with torch.compile (dynamic shapes)."""
    compiled: Callable[..., Any] = torch.compile
    for layer in head.layers:
        layer.project = compiled(layer.project, dynamic=True)
        layer.finish = compiled(layer.finish, dynamic=True)
        layer.self_attn.key_value = compiled(layer.self_attn.key_value, dynamic=True)
    head.context_features = compiled(head.context_features, dynamic=True)  # type: ignore
