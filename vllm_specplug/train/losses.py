# SPDX-License-Identifier: Apache-2.0
"""Distillation losses through a frozen LM head, with their gradients written out.

The LM head is the largest matrix of a training step. With a hand-written gradient only one chunk
of logits is alive at a time, and the backward pass needs one GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Each slope function takes logits [n, V'] of draft and target (already divided by the temperature)
# and returns the rows' losses [n, 1] and their gradient in the draft logits [n, V'].


def _forward_kl(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp, logq = torch.log_softmax(logits, -1), torch.log_softmax(target, -1)
    q = logq.exp()
    return (q * (logq - logp)).sum(-1, keepdim=True), logp.exp() - q


def _sft(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = labels.clamp_min(0)[:, None]
    logp = torch.log_softmax(logits, -1)
    slope = logp.exp().scatter_add(1, index, -torch.ones_like(index, dtype=logp.dtype))
    return -logp.gather(1, index), slope


def _chunk_slope(
    kind: str,
    logits: torch.Tensor,
    target: torch.Tensor | None,
    labels: torch.Tensor,
    weights: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted loss of a chunk and its gradient in the raw logits, in their dtype."""
    scaled = logits.float() / temperature
    if kind == "sft":
        loss, slope = _sft(scaled, labels)
    else:
        assert target is not None
        loss, slope = _forward_kl(scaled, target.float() / temperature)
    # T^2 of the distillation loss times 1/T of the inner derivative.
    weights = weights[:, None]
    return (
        (loss * weights).sum() * temperature**2,
        (slope * (weights * temperature)).to(logits.dtype),
    )


_compiled_chunk_slope = torch.compile(_chunk_slope, dynamic=False)


class _HeadLoss(torch.autograd.Function):
    """Weighted sum over rows of a loss between softmax(h W^T) and softmax(t W^T)."""

    @staticmethod
    def forward(ctx, hidden, teacher, lm_head, labels, weights, kind, temperature, chunk, compiled):
        count = hidden.shape[0]
        # With equal chunks one compiled kernel serves all. Padding rows have weight 0.
        padding = -count % chunk if compiled else 0
        if padding:
            hidden = F.pad(hidden, (0, 0, 0, padding))
            teacher = None if teacher is None else F.pad(teacher, (0, 0, 0, padding))
            labels, weights = F.pad(labels, (0, padding)), F.pad(weights, (0, padding))
        slope_of = _compiled_chunk_slope if compiled else _chunk_slope
        table = lm_head.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows] @ table.t()
            target = None if kind == "sft" else teacher[rows] @ lm_head.t()
            loss, slope = slope_of(kind, logits, target, labels[rows], weights[rows], temperature)
            total += loss
            grad[rows] = slope @ table
        ctx.save_for_backward(grad[:count])
        return total

    @staticmethod
    def backward(ctx, grad_output):
        (grad,) = ctx.saved_tensors
        return (grad * grad_output.to(grad.dtype), *[None] * 8)


def head_loss(
    # [N, H]
    hidden: torch.Tensor,
    # [N, Ht], or None for sft
    teacher: torch.Tensor | None,
    # [V', H]
    lm_head: torch.Tensor,
    # [N]
    labels: torch.Tensor,
    # [N]
    weights: torch.Tensor,
    kind: str = "forward_kl",
    temperature: float = 1.0,
    chunk: int = 512,
    compiled: bool = False,
) -> torch.Tensor:
    """Returns the sum over rows of weight times the loss of one predicted token.

    `forward_kl` is KL(target || draft) over the draft vocabulary at `temperature`, times
    temperature^2 (Hinton et al., 2015); `sft` is the cross-entropy of `labels`. Rows whose token is
    outside the draft vocabulary are not supervised.

    Args:
        hidden: the head's final normed states.
        teacher: the target's final normed states, whose logits are `teacher @ lm_head.T`.
        labels: draft ids, -1 for tokens outside the draft vocabulary.
        lm_head: frozen rows of the draft vocabulary.
        weights: float32; rows of weight 0 add nothing.
        chunk: rows whose logits are alive at a time.
        compiled: fuses the elementwise work with torch.compile.
    """
    # Without the token in the draft vocabulary, the target's distribution over the other tokens is
    # renormalised and would teach the head a wrong token.
    weights = torch.where(labels >= 0, weights, 0.0)
    return _HeadLoss.apply(
        hidden, teacher, lm_head, labels, weights, kind, temperature, chunk, compiled
    )


def slot_weights(valid: torch.Tensor, gamma: float) -> torch.Tensor:
    """Returns weights of the D slots of A blocks that sum to 1, float32 [A * D].

    Slot j = 1..D has exp(-(j - 1) / gamma) if it is `valid` [A, D], else 0. Gamma 0 or less means
    no decay.
    """
    slots = torch.arange(valid.shape[1], dtype=torch.float32, device=valid.device)
    decay = torch.ones_like(slots) if gamma <= 0 else torch.exp(-slots / gamma)
    weights = (decay * valid).flatten()
    return weights / weights.sum()
