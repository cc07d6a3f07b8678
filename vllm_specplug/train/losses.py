# SPDX-License-Identifier: Apache-2.0
"""Losses through a frozen LM head, in chunks of rows.

The LM head is the largest matrix of a training step. The gradient of a chunk is computed with its
loss, so that the logits of only one chunk are alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F


def sum_by_chunks(
    loss: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    shared: Sequence[torch.Tensor] = (),
    *,
    chunk: int,
) -> torch.Tensor:
    """Returns the sum over chunks of rows of `loss(rows, *tensors[rows], *shared)`.

    It has gradients in `tensors` [N, ..] and `shared`.
    """
    total, by_chunk = torch.zeros((), device=tensors[0].device), []
    of_shared = [torch.zeros_like(tensor) for tensor in shared]
    for start in range(0, len(tensors[0]), chunk):
        rows = slice(start, start + chunk)
        own = [x.detach().requires_grad_() for x in (*(t[rows] for t in tensors), *shared)]
        value = loss(rows, *own)
        found = torch.autograd.grad(value, own)
        by_chunk.append(found[: len(tensors)])
        for known, grad in zip(of_shared, found[len(tensors) :], strict=True):
            known += grad
        total += value.detach()
    grads = [*map(torch.cat, zip(*by_chunk, strict=True)), *of_shared]
    pairs = zip((*tensors, *shared), grads, strict=True)
    # A linear function has these gradients.
    linear: torch.Tensor = sum((x * grad).sum() for x, grad in pairs)  # type: ignore[assignment]
    return total + (linear - linear.detach())


def _distillation(
    kind: str,
    # [n, V']
    logits: torch.Tensor,
    target: torch.Tensor | None,
    labels: torch.Tensor,
    weights: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Returns the weighted loss of a chunk."""
    logits = logits.float() / temperature
    if kind == "sft":
        losses = F.cross_entropy(logits, labels.clamp_min(0), reduction="none")
    else:
        assert target is not None
        log_q = torch.log_softmax(target.float() / temperature, -1)
        log_p = torch.log_softmax(logits, -1)
        losses = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    return (losses * weights).sum() * temperature**2


_compiled_distillation = torch.compile(_distillation, dynamic=True)


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
    distil = _compiled_distillation if compiled else _distillation
    table = lm_head.to(hidden.dtype)

    def of_rows(rows: slice, own: torch.Tensor) -> torch.Tensor:
        target = None if teacher is None or kind == "sft" else teacher[rows] @ lm_head.t()
        return distil(kind, own @ table.t(), target, labels[rows], weights[rows], temperature)

    return sum_by_chunks(of_rows, [hidden], chunk=chunk)


def slot_weights(valid: torch.Tensor, gamma: float) -> torch.Tensor:
    """Returns weights of the D slots of A blocks that sum to 1, float32 [A * D].

    Slot j = 1..D has exp(-(j - 1) / gamma) if it is `valid` [A, D], else 0. Gamma 0 or less means
    no decay.
    """
    slots = torch.arange(valid.shape[1], dtype=torch.float32, device=valid.device)
    decay = torch.ones_like(slots) if gamma <= 0 else torch.exp(-slots / gamma)
    weights = (decay * valid).flatten()
    return weights / weights.sum()
