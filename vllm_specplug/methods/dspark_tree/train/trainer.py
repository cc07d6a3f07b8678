# SPDX-License-Identifier: Apache-2.0
"""Training of a DSpark head from cached features: block, Markov head and confidence head together.

The Markov head is given the answer's own tokens, as the published trainers do: slot k reads the
token before the one it predicts, the anchor first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.blocks import BlockBatch, run_blocks
from vllm_specplug.methods.block.train.trainer import compile_head, draw_blocks
from vllm_specplug.methods.dspark_tree.config import DSparkConfig
from vllm_specplug.methods.dspark_tree.train.loss import markov_loss
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.losses import position_weights
from vllm_specplug.train.order import DataOrder
from vllm_specplug.train.recipe import Recipe
from vllm_specplug.train.trainer import StepLoss, Trainer


@dataclass(frozen=True)
class DSparkRecipe(Recipe):
    """Weights of the three losses, and of slot k relative to the first: exp(-k / position_gamma).
    The defaults are the published ones."""

    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    position_gamma: float = 4.0
    anchors_per_step: int = 640
    anchor_stride: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_least(
            anchors_per_step=1, anchor_stride=1, ce_weight=0, l1_weight=0, confidence_weight=0,
            position_gamma=0,
        )  # fmt: skip


class MarkovHead(nn.Module):
    """W_1 [V, r] by target token and W_2 [V', r] by draft id; starts as a no-op."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """The logit of how likely a draft is accepted."""

    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, 1)


class DSparkModel(nn.Module):
    """All that is trained; the tensors beside the block have the names of the checkpoint."""

    def __init__(self, config: DSparkConfig, block: BlockHead | None = None):
        super().__init__()
        self.config = config
        self.block = BlockHead(config.block) if block is None else block
        self.markov_head = MarkovHead(
            config.block.vocab_size, config.block.draft_vocab_size, config.markov_rank
        )
        if config.confidence_size:
            self.confidence_head = ConfidenceHead(config.confidence_size)


class _Drafting(nn.Module):
    """The model with its frozen table, so that one forward is a whole training forward."""

    def __init__(self, model: DSparkModel, embed_tokens: torch.Tensor):
        super().__init__()
        self.model = model
        self.embed_tokens: torch.Tensor
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)

    def forward(self, batch: BlockBatch, before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """States [A*D, H], Markov vectors [A*D, r] and confidence logits [A*D] of the drafted
        tokens, which `before` [A*D] precede."""
        hidden = run_blocks(self.model.block, batch, self.embed_tokens)
        ranks = self.model.markov_head.markov_w1(before)
        if not self.model.config.confidence_size:
            return hidden, ranks, hidden.new_zeros(len(hidden))
        size = self.model.config.confidence_size
        joined = torch.cat((hidden, ranks.to(hidden.dtype)), -1)[:, :size]
        return hidden, ranks, self.model.confidence_head.proj(joined).squeeze(-1)


def tokens_before(batch: BlockBatch) -> torch.Tensor:
    """Target token before each drafted one, int64 [A*D]: the anchor, then the answer's own."""
    labels = batch.labels.view(len(batch.anchor_tokens), -1)
    return torch.cat((batch.anchor_tokens[:, None], labels[:, :-1]), 1).flatten()


class DSparkTrainer(Trainer):
    """One training run of a DSpark head.

    Args:
        model: initialised.
        embed_tokens: [V, H]; draft_lm_head: [V', H] rows of the target's LM head, frozen;
        target_ids: int64 [V'] token of each draft id.
    """

    def __init__(
        self,
        model: DSparkModel,
        store: FeatureStore,
        options: DSparkRecipe,
        *,
        embed_tokens: torch.Tensor,
        draft_lm_head: torch.Tensor,
        target_ids: torch.Tensor,
        accelerator: Accelerator | None = None,
    ):
        drafting = _Drafting(model.float(), embed_tokens.to(torch.bfloat16))
        super().__init__(model, drafting, DataOrder(store, options.seed), options, accelerator)
        self.model, self.store, self.recipe = model, store, options
        self.lm_head = draft_lm_head.to(self.device, torch.bfloat16)
        self.to_draft = torch.full((embed_tokens.shape[0],), -1, dtype=torch.int64)
        self.to_draft[target_ids] = torch.arange(len(target_ids))
        if options.compile:
            compile_head(model.block)

    def next_batch(self) -> BlockBatch:
        """The blocks of the next step on this process."""
        config = self.model.config.block
        return draw_blocks(
            self,
            self.store,
            config,
            config.block_size,
            self.recipe.anchors_per_step,
            self.recipe.anchor_stride,
            self.step_generator(),
        )

    def step_loss(self) -> StepLoss:
        recipe, depth = self.recipe, self.model.config.block.num_draft_tokens
        batch = self.next_batch()
        labels, before = self.to_draft[batch.labels].to(self.device), tokens_before(batch)
        weights = position_weights(depth, recipe.position_gamma)
        weights = weights.repeat(len(batch.anchor_tokens)) * batch.valid
        weights = (weights / weights.sum()).to(self.device)
        batch = batch.to(self.device)
        with self.accelerator.autocast():
            hidden, ranks, confidence = self.forward_module(batch, before.to(self.device))
        loss, accepted = markov_loss(
            hidden.to(torch.bfloat16),
            ranks,
            self.model.markov_head.markov_w2.weight,
            self.lm_head,
            batch.teacher,
            labels,
            weights,
            ce=recipe.ce_weight,
            l1=recipe.l1_weight,
        )
        total = loss
        if self.model.config.confidence_size and recipe.confidence_weight > 0:
            errors = F.binary_cross_entropy_with_logits(
                confidence.float(), accepted.clamp(0, 1), reduction="none"
            )
            # Nothing is known of a token that cannot be drafted.
            known = torch.where(labels >= 0, weights, 0.0)
            total = loss + recipe.confidence_weight * (errors * known).sum()
        return StepLoss(total, loss, int(batch.valid.sum()), len(batch.positions))

    def drafting_embeds(self) -> torch.Tensor:
        """The frozen token embeddings, on the training device."""
        return self.accelerator.unwrap_model(self.forward_module).embed_tokens

    def averaged_model(self) -> DSparkModel:
        """A copy of the model with the averaged weights."""
        with torch.device("meta"):
            model = DSparkModel(self.model.config)
        model.load_state_dict(self.averaged_weights(), assign=True)
        return model.eval()
