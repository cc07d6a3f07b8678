# SPDX-License-Identifier: Apache-2.0
"""The training objective of TokenSwift's heads, from cached features of the frozen target.

The loss is the sum over heads. Head i (from 0) predicts the token i + 2 positions after the one
whose last-layer output it reads: with the published cross-entropy ("sft"), or the divergence from
the target's distribution ("forward_kl"), which has more information per position. Only answer
tokens are predicted, because the target chose them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_specplug.methods.tokenswift.head import TokenSwiftConfig, TokenSwiftHeads
from vllm_specplug.methods.tokenswift.train.options import TokenSwiftRecipe
from vllm_specplug.train.features import Features, FeatureSequence
from vllm_specplug.train.trainer import Objective, StepLoss, Trainer
from vllm_specplug.train.vocabulary import DraftTables

logger = logging.getLogger(__name__)


def last_layer_columns(store: Features, num_layers: int, hidden_size: int) -> slice:
    """Returns the columns of `aux` that hold the last decoder layer's output.

    Raises:
        ValueError: for features without that layer.
    """
    ids = store.target_layer_ids
    if num_layers - 1 not in ids:
        raise ValueError(
            f"features hold target layers {list(ids)}, legal: layers that include the last one, "
            f"{num_layers - 1}, whose output the heads read; make them with --layers"
        )
    start = ids.index(num_layers - 1) * hidden_size
    return slice(start, start + hidden_size)


def training_rows(sequence: FeatureSequence, num_heads: int) -> tuple[int, int]:
    """Returns the first and end position whose head targets, at offsets 2 .. num_heads + 1, are
    answer tokens."""
    first = max(sequence.prompt_len - 2, 0)
    return first, max(len(sequence.tokens) - num_heads - 1, first)


def require_rows(store: Features, num_heads: int) -> None:
    """Counts answers without a position to train on.

    Raises:
        ValueError: if none has one.
    """
    bounds = (training_rows(store.text(index), num_heads) for index in range(len(store)))
    short = sum(end == first for first, end in bounds)
    if short == len(store):
        raise ValueError(
            f"no answer in {str(store.folder)!r} is longer than {num_heads + 1} tokens; "
            "make longer ones"
        )
    if short:
        logger.warning(
            "%s: %d of %d answers have %d tokens or fewer, and are not trained on",
            store.folder, short, len(store), num_heads + 1,
        )  # fmt: skip


def new_heads(config: TokenSwiftConfig, final_norm: torch.Tensor) -> TokenSwiftHeads:
    """Returns heads that repeat the base prediction: zero matrices and the target's final norm."""
    heads = TokenSwiftHeads(config)
    with torch.no_grad():
        for head in heads.medusa_layers:
            head.linear.weight.zero_()
            head.post_layernorm.weight.copy_(final_norm)
    return heads


class Positions(NamedTuple):
    """hidden [T, H], each head's target tokens int64 [num_heads, T], and the target's final states
    that predict them [num_heads, T, H]."""

    hidden: torch.Tensor
    targets: torch.Tensor
    teachers: torch.Tensor


@dataclass(frozen=True)
class TokenSwiftObjective(Objective):
    """Trains `TokenSwiftHeads`; `columns` of the features' `aux` hold the last layer's output."""

    recipe: TokenSwiftRecipe
    columns: slice

    def draw(self, trainer: Trainer) -> Positions:
        """Returns about `tokens_per_step` positions."""
        count = trainer.head.config.medusa_heads
        sequences, rows = trainer.draw_rows(
            self.recipe.tokens_per_step,
            lambda sequence, left: torch.arange(*training_rows(sequence, count)),
        )
        pairs, offsets = list(zip(sequences, rows, strict=True)), range(2, count + 2)
        return Positions(
            torch.cat([s.aux[at][:, self.columns] for s, at in pairs]),
            torch.stack([torch.cat([s.tokens[at + k] for s, at in pairs]) for k in offsets]),
            torch.stack([torch.cat([s.hidden[at + k - 1] for s, at in pairs]) for k in offsets]),
        )

    def forward(
        self, heads: TokenSwiftHeads, hidden: torch.Tensor, embed_tokens: torch.Tensor
    ) -> torch.Tensor:
        return heads(hidden)

    def loss(self, trainer: Trainer, batch: Positions) -> StepLoss:
        outputs, slots = trainer.forward(batch.hidden.float()), batch.targets.numel()
        labels = trainer.to_draft[batch.targets].flatten()
        # The sum of the heads' means.
        weights = torch.full((slots,), len(batch.targets) / slots, device=trainer.device)
        loss = trainer.distil(
            self.recipe, outputs.flatten(0, 1), batch.teachers.flatten(0, 1), labels, weights
        )
        return StepLoss(loss, loss.detach() / len(batch.targets), slots, slots)

    def drafts(
        self,
        heads: TokenSwiftHeads,
        sequence: FeatureSequence,
        anchors: torch.Tensor,
        tables: DraftTables,
    ) -> torch.Tensor:
        # Heads read the position before the anchor, the last one that was verified.
        hidden = sequence.aux[anchors - 1][:, self.columns].to(tables.lm_head.device)
        return tables.likeliest(heads(hidden.float())).t()
