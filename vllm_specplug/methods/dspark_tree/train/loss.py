# SPDX-License-Identifier: Apache-2.0
"""The published objective of a DSpark head (arXiv 2607.05147).

With p the draft's and q the target's distribution of a token y, a row's loss is

    ce * -log p(y) + l1 * sum |p - q|,

and its acceptance 1 - sum |p - q| / 2, which the confidence head learns. The draft's scores are
h W^T + e W_2^T: the block's from the frozen LM head plus the Markov head's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_specplug.train.losses import sum_by_chunks


def markov_loss(
    hidden: torch.Tensor,
    ranks: torch.Tensor,
    markov: torch.Tensor,
    lm_head: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    ce: float,
    l1: float,
    chunk: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted sum of the rows' losses, and each row's acceptance [N] without gradient.

    Args:
        hidden: [N, H], the block's final normed states.
        ranks: [N, r], the Markov head's vectors of the previous tokens.
        markov: [V', r], W_2.
        lm_head: [V', H] rows of the draft vocabulary; frozen.
        teacher: [N, H], the target's final normed states.
        labels: int64 [N], draft ids; -1 for tokens outside the draft vocabulary, whose rows have
            no loss.
        weights: float32 [N].
        chunk: number of rows whose logits are in memory at a time.
    """
    weights = torch.where(labels >= 0, weights, 0.0)
    accepted = []

    def of_rows(
        rows: slice, own: torch.Tensor, ranks: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        logits = (own @ lm_head.t() + ranks @ table.to(ranks.dtype).t()).float()
        target = (teacher[rows] @ lm_head.t()).float()
        distance = (logits.softmax(-1) - target.softmax(-1)).abs().sum(-1)
        entropy = F.cross_entropy(logits, labels[rows].clamp_min(0), reduction="none")
        accepted.append(1 - distance.detach() / 2)
        return ((ce * entropy + l1 * distance) * weights[rows]).sum()

    total = sum_by_chunks(of_rows, [hidden, ranks.to(hidden.dtype)], [markov], chunk=chunk)
    return total, torch.cat(accepted)
