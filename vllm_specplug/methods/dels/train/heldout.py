# SPDX-License-Identifier: Apache-2.0
"""The cross-entropy of a local head on held-out answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from vllm_specplug.methods.dels.train.batch import pack_local
from vllm_specplug.methods.local.head import LocalHead
from vllm_specplug.train.features import TokenSequence
from vllm_specplug.train.trainer import to_device
from vllm_specplug.train.vocabulary import DraftTables


@dataclass(frozen=True)
class LocalReport:
    """Mean cross-entropies in nats: of the head after it has read 1, 2, .. tokens, and of the
    unigram prior, which reads none."""

    axis: ClassVar[str] = "cross-entropy in nats"

    by_tokens_read: list[float]
    unigram: float

    def curves(self) -> dict[str, float]:
        """Returns the cross-entropies by what is read."""
        read = enumerate(self.by_tokens_read, 1)
        return {"unigram": self.unigram, **{f"{count} read": value for count, value in read}}

    def facts(self) -> dict[str, Any]:
        """Returns the values for provenance.json."""
        return {
            "cross_entropy_by_tokens_read": [round(value, 4) for value in self.by_tokens_read],
            "unigram_cross_entropy": round(self.unigram, 4),
        }

    def summary(self) -> str:
        """Returns the report as one line of text."""
        return f"held-out {self.facts()}"


@torch.no_grad()
def heldout_losses(
    head: LocalHead,
    sequences: Sequence[TokenSequence],
    block_size: int,
    tables: DraftTables,
) -> list[float]:
    """Returns the mean cross-entropy in nats after reading 1, 2, ... tokens, over scored tokens."""
    device = tables.lm_head.device
    draft_ids = tables.draft_ids().to(device)
    total, count = (torch.zeros(block_size - 1, device=device) for _ in range(2))
    for sequence in sequences:
        anchors = torch.arange(sequence.prompt_len, len(sequence.tokens) - 1)[::4]
        if not len(anchors):
            continue
        batch = to_device(pack_local([sequence], [anchors], block_size), device)
        labels = draft_ids[batch.labels]
        known = batch.valid & (labels >= 0)
        ranks = head.ranks(batch.tokens, tables.embed_tokens)
        logits = head.logits(ranks.to(tables.lm_head.dtype).to(ranks.dtype), tables.lm_head)
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), labels.clamp_min(0).flatten(), reduction="none"
        )
        total += (losses.view_as(labels) * known).sum(0)
        count += known.sum(0)
    return (total / count.clamp_min(1)).tolist()


def unigram_loss(
    log_prior: torch.Tensor, sequences: Sequence[TokenSequence], target_ids: torch.Tensor
) -> float:
    """Returns the mean cross-entropy in nats of the prior, renormalised to the scored tokens."""
    scored = torch.full_like(log_prior, -math.inf)
    scored[target_ids] = torch.log_softmax(log_prior[target_ids], -1)
    answers = torch.cat([s.tokens[s.prompt_len + 1 :] for s in sequences])
    losses = -scored[answers]
    return float(losses[losses.isfinite()].mean())
