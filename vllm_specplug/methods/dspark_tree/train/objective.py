# SPDX-License-Identifier: Apache-2.0
"""The training objective of a DSpark head, from cached features: block, Markov and confidence head.

As in the published trainers, the Markov head reads the answer's tokens: slot k reads the token
before the one that it predicts, the anchor first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.blocks import BlockBatch, run_blocks
from vllm_specplug.methods.block.train.objective import draw_blocks, pack_heldout
from vllm_specplug.methods.dspark_tree.config import DSparkConfig
from vllm_specplug.methods.dspark_tree.train.loss import markov_loss
from vllm_specplug.methods.dspark_tree.train.options import DSparkRecipe
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.losses import slot_weights
from vllm_specplug.train.trainer import Objective, StepLoss, Trainer
from vllm_specplug.train.vocabulary import DraftTables


class MarkovHead(nn.Module):
    """W_1 [V, r] by target token and W_2 [V', r] by draft id, which starts at zero."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """Computes the logit of a draft's acceptance."""

    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, 1)


class DSparkModel(nn.Module):
    """All trained parameters. Tensors outside of the block have the names of the checkpoint."""

    def __init__(self, config: DSparkConfig, block: BlockHead | None = None):
        super().__init__()
        self.config = config
        self.block = BlockHead(config) if block is None else block
        self.markov_head = MarkovHead(
            config.vocab_size, config.draft_vocab_size, config.markov_rank
        )
        if config.confidence_size:
            self.confidence_head = ConfidenceHead(config.confidence_size)


def tokens_before(batch: BlockBatch) -> torch.Tensor:
    """Returns the token before each drafted one, int64 [A*D]: the anchor, then the answer's."""
    labels = batch.labels.view(len(batch.anchor_tokens), -1)
    return torch.cat((batch.anchor_tokens[:, None], labels[:, :-1]), 1).flatten()


@dataclass(frozen=True)
class DSparkObjective(Objective):
    """Trains a `DSparkModel`."""

    recipe: DSparkRecipe

    def draw(self, trainer: Trainer) -> BlockBatch:
        return draw_blocks(trainer, self.recipe, trainer.head.config)

    def forward(
        self, model: DSparkModel, batch: BlockBatch, embed_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns states [A*D, H], Markov vectors [A*D, r] and confidence logits [A*D] of the
        drafted tokens."""
        hidden = run_blocks(model.block, batch, embed_tokens)
        ranks = model.markov_head.markov_w1(tokens_before(batch))
        size = model.config.confidence_size
        if not size:
            return hidden, ranks, hidden.new_zeros(len(hidden))
        joined = torch.cat((hidden, ranks.to(hidden.dtype)), -1)[:, :size]
        return hidden, ranks, model.confidence_head.proj(joined).squeeze(-1)

    def loss(self, trainer: Trainer, batch: BlockBatch) -> StepLoss:
        recipe, labels = self.recipe, trainer.to_draft[batch.labels]
        weights = slot_weights(
            batch.valid.view(len(batch.anchor_tokens), -1), recipe.position_gamma
        )
        hidden, ranks, confidence = trainer.forward(batch)
        loss, accepted = markov_loss(
            hidden.to(trainer.tables.lm_head.dtype),
            ranks,
            trainer.head.markov_head.markov_w2.weight,
            trainer.tables.lm_head,
            batch.teacher,
            labels,
            weights,
            ce=recipe.ce_weight,
            l1=recipe.l1_weight,
        )
        total = loss
        if trainer.head.config.confidence_size and recipe.confidence_weight > 0:
            errors = F.binary_cross_entropy_with_logits(
                confidence.float(), accepted.clamp(0, 1), reduction="none"
            )
            # The acceptance of a token outside the draft vocabulary is not known.
            known = torch.where(labels >= 0, weights, 0.0)
            total = loss + recipe.confidence_weight * (errors * known).sum()
        return StepLoss(total, loss, int(batch.valid.sum()), len(batch.positions))

    def drafts(
        self,
        model: DSparkModel,
        sequence: FeatureSequence,
        anchors: torch.Tensor,
        tables: DraftTables,
    ) -> torch.Tensor:
        batch = pack_heldout(model.config, sequence, anchors, tables)
        hidden, ranks, _ = self.forward(model, batch, tables.embed_tokens)
        # A draft's scores are h W^T + e W_2^T.
        best = tables.likeliest(hidden, (ranks, model.markov_head.markov_w2.weight))
        return best.view(len(anchors), -1)
