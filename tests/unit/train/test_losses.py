# SPDX-License-Identifier: Apache-2.0
"""Losses by chunks and their gradients, against the loss of all rows at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm_specplug.train.losses import head_loss, slot_weights
from vllm_specplug.train.options import LOSSES


def reference(kind, hidden, teacher, lm_head, labels, weights, temperature):
    logits, target = hidden @ lm_head.t(), teacher @ lm_head.t()
    if kind == "sft":
        logits = logits / temperature
        per_row = F.cross_entropy(logits, labels, ignore_index=-1, reduction="none")
    else:
        logp = F.log_softmax(logits / temperature, -1)
        logq = F.log_softmax(target / temperature, -1)
        per_row = (logq.exp() * (logq - logp)).sum(-1) * (labels >= 0)
    return (per_row * weights).sum() * temperature**2


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("chunk", "compiled"), [(4, False), (512, False), (512, True)])
def test_loss_and_gradient_equal_autograd(kind, temperature, chunk, compiled):
    torch.manual_seed(0)
    hidden = torch.randn(11, 16, requires_grad=True)
    teacher, lm_head = torch.randn(11, 16), torch.randn(30, 16)
    labels = torch.randint(-1, 30, (11,))
    labels[3] = -1
    weights = torch.rand(11)
    weights[5] = 0.0
    want = reference(kind, hidden, teacher, lm_head, labels, weights, temperature)
    (want_grad,) = torch.autograd.grad(want * 3.0, hidden)
    got = head_loss(hidden, teacher, lm_head, labels, weights, kind, temperature, chunk, compiled)
    (got_grad,) = torch.autograd.grad(got * 3.0, hidden)
    torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-4, atol=1e-5)


def test_slot_weights_decay_where_valid_and_sum_to_one():
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    weights = slot_weights(valid, 2.0).view(2, 4)
    assert float(weights.sum()) == pytest.approx(1.0) and not weights[~valid].any()
    decay = torch.full((3,), 2.718281828**-0.5)
    torch.testing.assert_close(weights[0, 1:] / weights[0, :-1], decay)
    assert torch.equal(weights[0, :2], weights[1, :2])
    assert torch.equal(slot_weights(valid, 0.0), valid.flatten() / 6)
