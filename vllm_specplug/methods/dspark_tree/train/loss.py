# SPDX-License-Identifier: Apache-2.0
"""The published objective of a DSpark head (arXiv 2607.05147).

With p the draft's and q the target's distribution of a token y, a row's loss is

    ce * -log p(y) + l1 * sum |p - q|,

and its acceptance 1 - sum |p - q| / 2, which the confidence head learns. The draft's scores are
h W^T + e W_2^T: the block's from the frozen LM head plus the Markov head's. Gradients are explicit,
so that only one chunk of logits is in memory at a time.
"""

from __future__ import annotations

import torch


def _chunk(
    logits: torch.Tensor,
    target: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    ce: float,
    l1: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the weighted loss of rows [n, V'] (scalar), their acceptance [n] and the gradient of
    the logits [n, V']."""
    log_p = torch.log_softmax(logits.float(), -1)
    p, q = log_p.exp(), torch.softmax(target.float(), -1)
    difference = p - q
    index = labels.clamp_min(0)[:, None]
    distance = difference.abs().sum(-1)
    loss = ((-ce * log_p.gather(1, index).squeeze(1) + l1 * distance) * weights).sum()
    sign = difference.sign()
    slope = l1 * (sign - (p * sign).sum(-1, keepdim=True))
    slope = p * (slope + ce)
    slope.scatter_add_(1, index, slope.new_full(index.shape, -ce))
    return loss, 1 - distance / 2, (slope * weights[:, None]).to(logits.dtype)


class _MarkovLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, ranks, markov, lm_head, teacher, labels, weights, ce, l1, chunk):
        total = torch.zeros((), device=hidden.device)
        accepted = torch.empty(len(hidden), device=hidden.device)
        hidden_grad = torch.empty_like(hidden)
        ranks_grad = torch.empty_like(ranks)
        table = markov.to(ranks.dtype)
        markov_grad = torch.zeros_like(markov)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows] @ lm_head.t() + ranks[rows] @ table.t()
            target = teacher[rows] @ lm_head.t()
            loss, accepted[rows], slope = _chunk(
                logits, target, labels[rows], weights[rows], ce, l1
            )
            total += loss
            hidden_grad[rows] = slope @ lm_head
            ranks_grad[rows] = slope @ table
            markov_grad += slope.t() @ ranks[rows]
        ctx.save_for_backward(hidden_grad, ranks_grad, markov_grad)
        ctx.mark_non_differentiable(accepted)
        return total, accepted

    @staticmethod
    def backward(ctx, grad_output, _):
        scaled = [g * grad_output.to(g.dtype) for g in ctx.saved_tensors]
        return (*scaled, *[None] * 7)


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
    total, accepted = _MarkovLoss.apply(
        hidden, ranks.to(hidden.dtype), markov, lm_head, teacher, labels, weights, ce, l1, chunk
    )
    return total, accepted
