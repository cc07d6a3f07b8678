# SPDX-License-Identifier: Apache-2.0
"""Held-out results of a local head: its cross-entropy, and its acceptance with a backbone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vllm_specplug.methods.block.train.evaluate_run import Evaluation
from vllm_specplug.methods.dels.train.batch import pack_local
from vllm_specplug.methods.dels.train.evaluate import Fusion, LocalTables, evaluate_local_chains
from vllm_specplug.methods.local.head import LocalHead
from vllm_specplug.train.text import TextSequence
from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import AcceptanceReport, rounded


@dataclass(frozen=True)
class LocalReport:
    """Cross-entropies in nats and, with a backbone, acceptance lengths by policy."""

    by_tokens_read: list[float]
    unigram: float
    lengths: dict[str, float] | None

    @classmethod
    def measure(
        cls,
        head: LocalHead,
        sequences: Sequence[TextSequence],
        block_size: int,
        tables: DraftTables,
        prior: torch.Tensor,
        evaluation: Evaluation | None,
        weights: tuple[float, float],
    ) -> LocalReport:
        """Returns the report of a head; `weights` are alpha and beta of the fusion with the
        backbone of `evaluation`."""
        return cls(
            heldout_losses(head, sequences, block_size, tables),
            unigram_loss(prior, sequences, tables.target_ids),
            None if evaluation is None else heldout_lengths(head, evaluation, prior, *weights),
        )

    def facts(self) -> dict[str, Any]:
        """Returns the values for provenance.json."""
        lengths = {} if self.lengths is None else {"mean_acceptance_length": rounded(self.lengths)}
        return {
            "cross_entropy_by_tokens_read": [round(value, 4) for value in self.by_tokens_read],
            "unigram_cross_entropy": round(self.unigram, 4),
            **lengths,
        }

    def summary(self) -> str:
        """Returns the report as one line of text."""
        return f"held-out {self.facts()}"


@torch.no_grad()
def heldout_losses(
    head: LocalHead,
    sequences: Sequence[TextSequence],
    block_size: int,
    tables: DraftTables,
) -> list[float]:
    """Returns the mean cross-entropy in nats after reading 1, 2, ... tokens, over scored tokens."""
    draft_ids = tables.draft_ids()
    length = block_size - 1
    total, count = torch.zeros(length), torch.zeros(length)
    for sequence in sequences:
        anchors = torch.arange(sequence.prompt_len, len(sequence.tokens) - 1)[::4]
        if not len(anchors):
            continue
        batch = pack_local([sequence], [anchors], block_size)
        labels = draft_ids[batch.labels]
        known = batch.valid & (labels >= 0)
        ranks = head.ranks(batch.tokens, tables.embed_tokens)[0]
        logits = head.logits(ranks.to(tables.lm_head.dtype).to(ranks.dtype), tables.lm_head)
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), labels.clamp_min(0).flatten(), reduction="none"
        )
        total += (losses.view_as(labels) * known).sum(0)
        count += known.sum(0)
    return (total / count.clamp_min(1)).tolist()


def unigram_loss(
    log_prior: torch.Tensor, sequences: Sequence[TextSequence], target_ids: torch.Tensor
) -> float:
    """Returns the mean cross-entropy in nats of the prior, renormalised to the scored tokens."""
    scored = torch.full_like(log_prior, -math.inf)
    scored[target_ids] = torch.log_softmax(log_prior[target_ids], -1)
    answers = torch.cat([s.tokens[s.prompt_len + 1 :] for s in sequences])
    losses = -scored[answers]
    return float(losses[losses.isfinite()].mean())


def heldout_lengths(
    head: LocalHead, evaluation: Evaluation, log_prior: torch.Tensor, alpha: float, beta: float
) -> dict[str, float]:
    """Returns the acceptance lengths of the backbone's chain and of the fused chain, with and
    without the anchor as input."""
    report = AcceptanceReport()
    for name, fed in (("dels", False), ("dels, anchor fed", True)):
        # A head with its own table has one row per token of the backbone.
        tables = LocalTables.build(
            head, evaluation.draft, log_prior, evaluation.draft.target_ids, fed
        )
        fusion = Fusion.of(tables, evaluation.depth, alpha, beta)
        none = Fusion.of(tables, evaluation.depth, 0.0, 0.0)
        fusions = {name: fusion} if fed else {"backbone": none, name: fusion}
        evaluate_local_chains(tables, evaluation.drafted, fusions, report)
    return report.lengths()
