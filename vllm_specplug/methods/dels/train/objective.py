# SPDX-License-Identifier: Apache-2.0
"""The training objective of a local head (DeLS); the loss sft needs no states of the target.

The head is a language model of short context: it reads a block's tokens from the anchor on and
predicts each next one. Serving multiplies its distribution with the backbone's. Training does not
use the backbone. The head's output starts at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specplug.methods.dels.train.batch import (
    LocalBatch,
    TextSequence,
    local_anchors,
    pack_local,
)
from vllm_specplug.methods.dels.train.options import LocalRecipe
from vllm_specplug.methods.local.head import LocalHead
from vllm_specplug.train.losses import slot_weights
from vllm_specplug.train.order import random_subset
from vllm_specplug.train.trainer import Objective, StepLoss, Trainer
from vllm_specplug.train.vocabulary import DraftTables


@dataclass(frozen=True)
class LocalObjective(Objective):
    """Trains a local head.

    Args:
        block_size: including the anchor. A Markov head, which reads one token, uses 2: every pair
            of neighbours once.
        ranked: rows of the LM head in order of decreasing frequency, int64 [V'].
    """

    recipe: LocalRecipe
    block_size: int
    ranked: torch.Tensor

    def step_vocabulary(self, step: int) -> torch.Tensor | None:
        """Returns the rows of the LM head to train in a step, int64 [vocab_per_step]; None for all.

        Half of them are the most frequent ones, the others are drawn.
        """
        size = self.recipe.vocab_per_step
        if not 0 < size < len(self.ranked):
            return None
        frequent = size - size // 2
        generator = torch.Generator().manual_seed(self.recipe.seed * 104_729 + step)
        drawn = torch.randperm(len(self.ranked) - frequent, generator=generator)[: size // 2]
        return torch.cat((self.ranked[:frequent], self.ranked[frequent + drawn]))

    def draw(self, trainer: Trainer) -> LocalBatch:
        recipe, generator = self.recipe, trainer.step_generator()
        dense = trainer.head.config.kind == "markov"

        def pick(sequence: TextSequence, left: int) -> torch.Tensor:
            if dense:
                return local_anchors(sequence, 1 << 30, generator)
            at = local_anchors(sequence, recipe.anchors_per_sample, generator)
            return random_subset(at, left, generator)

        sequences, anchors = trainer.draw_rows(recipe.anchors_per_step, pick)
        return pack_local(sequences, anchors, self.block_size)

    def forward(
        self, head: LocalHead, tokens: torch.Tensor, embed_tokens: torch.Tensor
    ) -> torch.Tensor:
        """[A, L] -> [A * L, H]: inputs of the target's LM head."""
        return head.rank_to_hidden(head.ranks(tokens, embed_tokens)).flatten(0, 1)

    def loss(self, trainer: Trainer, batch: LocalBatch) -> StepLoss:
        recipe, table = self.recipe, trainer.tables.lm_head
        outputs = trainer.forward(batch.tokens)
        rows = self.step_vocabulary(trainer.step)
        if rows is not None:
            table = table[rows]
        loss = trainer.distil(
            recipe,
            outputs,
            None if recipe.loss == "sft" else batch.teacher,
            trainer.to_draft[batch.labels].flatten(),
            slot_weights(batch.valid, recipe.position_gamma),
            lm_head=table,
        )
        return StepLoss(loss, loss, int(batch.valid.sum()), batch.tokens.numel())

    def drafts(
        self,
        head: LocalHead,
        sequence: TextSequence,
        anchors: torch.Tensor,
        tables: DraftTables,
    ) -> torch.Tensor:
        batch = pack_local([sequence], [anchors], self.block_size)
        batch = tables.inputs(batch)
        outputs = self.forward(head, batch.tokens, tables.embed_tokens)
        return tables.likeliest(outputs).view(len(anchors), -1)
